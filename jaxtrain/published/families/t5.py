"""T5 and Flan-T5 (v1.1): https://github.com/google-research/t5x and the config.json published with each model. No jax here."""
