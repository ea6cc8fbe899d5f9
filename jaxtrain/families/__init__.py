"""One table per published family (docs/adding_a_family.md shows how to add one), and their list. No jax here."""
