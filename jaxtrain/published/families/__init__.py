"""One file per published family, and the table of them. No jax here."""
