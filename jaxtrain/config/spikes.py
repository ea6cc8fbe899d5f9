"""What is done about numbers that go wrong although they are finite. No jax here."""

from typing import Annotated, Literal

from pydantic import Field

from jaxtrain.config.base import Group
from jaxtrain.config.checkpoint import CheckpointConfig
from jaxtrain.config.numbers import PositiveInt, Scale
from jaxtrain.errors import ConfigError


class SpikesConfig(Group):
    """Steps whose loss or gradient norm is far above those before them (docs/reliability.md)."""

    action: Literal["skip", "roll_back"] = "skip"
    """skip: such a step leaves the state as it was; roll_back: go back to a checkpoint and past the data around it."""
    watch: Literal["loss", "grad_norm", "both"] = "both"
    """The metrics that are compared."""
    window: Annotated[int, Field(ge=4, le=65536)] = 128
    """Number of the last accepted steps that are compared with; the first half window of a run is always accepted."""
    sigmas: Scale = 6.0
    """A spike is more than this many standard deviations above the mean of the window."""
    roll_back_steps: PositiveInt = 100
    """roll_back: the checkpoint is at least this many steps before the spike."""
    skip_batches: PositiveInt = 300
    """roll_back: batches that are left out from the checkpoint on; more where the spike's own batch is beyond them."""
    max_roll_backs: PositiveInt = 3
    """roll_back: most times per run; later spikes are skipped."""


class ChecksConfig(Group):
    """Comparisons that find devices which compute or keep wrong numbers (docs/reliability.md)."""

    replay_every: PositiveInt | None = None
    """Steps between steps that are computed twice and compared bit for bit, with a copy of the state; null: never."""
    replicas_every: PositiveInt | None = None
    """Steps between comparisons of all copies of replicated arrays, bit for bit; null: never."""


def check_roll_back(spikes: SpikesConfig | None, checkpoint: CheckpointConfig) -> None:
    """Raise where no checkpoint would be old enough to go back to.

    Args:
        spikes: the group; None: spikes are not looked for.
        checkpoint: when states are saved, and which stay. Of saves by the clock nothing is known in steps.

    Raises:
        ConfigError: names the keys and the values that work.
    """
    every, keep_last = checkpoint.every, checkpoint.keep_last
    if spikes is None or spikes.action != "roll_back" or (every is None and checkpoint.every_minutes is not None):
        return
    if every is None:
        raise ConfigError(
            "spikes.action=roll_back goes back to a checkpoint, and checkpoint.every is null; set it, such as 100, or "
            "spikes.action=skip"
        )
    needed = 1 + -(-(spikes.roll_back_steps - 1) // every)
    if keep_last < needed:
        raise ConfigError(
            f"spikes.roll_back_steps={spikes.roll_back_steps} goes back further than the checkpoints that "
            f"checkpoint.keep_last={keep_last} with checkpoint.every={every} keeps; set checkpoint.keep_last={needed}"
        )
