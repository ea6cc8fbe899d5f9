"""Optimizers and learning rate schedules, built from optax's transformations."""
