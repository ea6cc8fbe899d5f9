"""T5 and Flan-T5 (v1.1). No jax here.

Sources: Raffel et al. 2020, and the config.json published with each model.
"""
