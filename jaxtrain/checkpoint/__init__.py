"""Save, restore on any mesh, verify, keep and prune. Importing this loads neither jax nor Orbax."""

from jaxtrain.checkpoint.checkpointer import Checkpointer
from jaxtrain.checkpoint.directory import CheckpointInfo

__all__ = ["CheckpointInfo", "Checkpointer"]
