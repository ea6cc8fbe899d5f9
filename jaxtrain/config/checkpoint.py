"""The config group `checkpoint`. No jax here."""

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from jaxtrain.config.base import Group, mistakes_told_by_pydantic
from jaxtrain.config.local_path import local_path
from jaxtrain.config.numbers import PositiveInt

# A week, in minutes: a longer interval is a mistake in the unit.
_LONGEST_MINUTES = 10_080.0
_PLACES = "use a local folder, gs://bucket/name or s3://bucket/name"


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
    directory: str | None = None
    """Where checkpoints are: a folder, gs://bucket/name or s3://bucket/name; null: in the run directory."""
    mirror: str | None = None
    """Folder (or gs://, s3://) for a second copy, in a subfolder named as the run directory; null: no copy."""
    max_failed_in_a_row: PositiveInt = 3
    """Stop (exit code 1) after this many saves in a row that failed, for lack of space or another reason."""

    @field_validator("directory", "mirror")
    @classmethod
    def _is_a_place(cls, place: str | None, info: ValidationInfo) -> str | None:
        if place is not None:
            # Not at the top: configs without a place of their own are read sooner.
            from jaxtrain.config.store_address import is_store_address, store_address

            if not place.strip():
                on = "on another disk" if info.field_name == "mirror" else "for the checkpoints"
                raise ValueError(f"it is empty; name a folder {on}, or write null")
            if is_store_address(place):
                store_address(place)
                return place
            with mistakes_told_by_pydantic():
                local_path(place, what=f"checkpoint.{info.field_name}", instead=_PLACES)
        return place
