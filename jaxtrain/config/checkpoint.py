"""The config group `checkpoint`. No jax here."""

from typing import Annotated

from pydantic import Field, field_validator

from jaxtrain.config.base import Group, mistakes_told_by_pydantic
from jaxtrain.config.local_path import local_path
from jaxtrain.config.numbers import PositiveInt

# A week, in minutes: a longer interval is a mistake in the unit.
_LONGEST_MINUTES = 10_080.0


class CheckpointConfig(Group):
    """When the state is saved, which checkpoints are kept, and where a second copy is."""

    every: PositiveInt | None = 1000
    """Steps between saves; null: save only at the end and on a signal."""
    every_minutes: Annotated[float, Field(gt=0, le=_LONGEST_MINUTES)] | None = None
    """Save too where this many minutes have passed since the last save; null: no such rule."""
    keep_last: PositiveInt = 2
    """Number of the newest checkpoints that are kept."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of this step are never deleted; null: no such rule."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest eval_loss, or with the best metric of evaluation.early_stopping."""
    mirror: str | None = None
    """Folder for a second copy of each checkpoint, in a subfolder named as the run directory; null: no copy."""
    max_failed_in_a_row: PositiveInt = 3
    """Stop (exit code 1) after this many saves in a row that failed, for lack of space or another reason."""

    @field_validator("mirror")
    @classmethod
    def _is_local(cls, mirror: str | None) -> str | None:
        if mirror is not None:
            if not mirror.strip():
                raise ValueError("it is empty; name a folder on another disk, or write null")
            with mistakes_told_by_pydantic():
                local_path(mirror, what="checkpoint.mirror")
        return mirror
