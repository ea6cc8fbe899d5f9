"""Checkpoints: saved, verified, restored on any mesh, and deleted by rules. The import loads neither jax nor Orbax."""

from jaxtrain.checkpoint.checkpointer import Checkpointer
from jaxtrain.checkpoint.directory import CheckpointInfo

__all__ = ["CheckpointInfo", "Checkpointer"]
