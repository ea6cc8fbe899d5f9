"""How long a run may stand still, phase by phase, before it is ended. No jax here."""

from typing import Annotated

from pydantic import Field

from jaxtrain.config.base import Group

# A year: whoever wants no limit at all turns the watchdog off.
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]


class WatchdogConfig(Group):
    """How long each phase may take without progress; a run that stands still for longer ends with exit code 70."""

    enabled: bool = True
    """Watch for stalls and lost processes; false: a run that hangs does so for ever."""
    start_seconds: Seconds = 14_400.0
    """Limit for starting and reading data."""
    compile_seconds: Seconds = 7_200.0
    """Limit for compiling, and for the first step of a process."""
    restore_seconds: Seconds = 3_600.0
    """Limit for creating the state or restoring a checkpoint."""
    step_seconds: Seconds = 300.0
    """Limit for a step, or 10 times the median step where that is longer."""
    data_seconds: Seconds = 1_800.0
    """Limit for the wait for a batch, or 10 times the median step where that is longer."""
    evaluation_seconds: Seconds = 3_600.0
    """Limit for a batch of an evaluation, for a sample, a callback and the report."""
    save_seconds: Seconds = 3_600.0
    """Limit for a save, also for what is written in the background."""
    lost_seconds: Annotated[float, Field(ge=1, le=3600)] = 25.0
    """Silence after which another process counts as lost; twice as long while it starts or reads data."""


def limits(watchdog: WatchdogConfig | None) -> WatchdogConfig | None:
    """Returns the limits that the key `watchdog` stands for; None: nothing is watched."""
    chosen = WatchdogConfig() if watchdog is None else watchdog
    return chosen if chosen.enabled else None
