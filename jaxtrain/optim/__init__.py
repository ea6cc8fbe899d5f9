"""Optimizers and learning rate schedules, built from optax."""

from jaxtrain.optim.optimizers import build_optimizer
from jaxtrain.optim.schedules import build_schedule

__all__ = ["build_optimizer", "build_schedule"]
