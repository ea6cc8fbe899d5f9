"""The time between two saves of a job whose hardware fails now and then. No jax here."""

from pathlib import Path
from typing import Any

from jaxtrain.config.files import is_run, read_run
from jaxtrain.errors import ConfigError
from jaxtrain.plan.cost.spot import young_interval

# Less is a save after every step or two, and more is not taken by `checkpoint.every_minutes` (a week).
_LEAST_MINUTES, _MOST_MINUTES = 0.1, 10_080.0


def measured_save_seconds(run_dir: Path) -> float | None:
    """Read what a save of a run costs: the time that it kept the devices from computing.

    Args:
        run_dir: directory of a run.

    Returns:
        Seconds per save, the mean over the newest saves that `run.json` lists; None where it lists fewer than two, or
        there is no run.

    Raises:
        ConfigError: `run.json` is damaged.
    """
    if not is_run(run_dir):
        return None
    saves = read_run(run_dir).get("saves")
    spent = [seconds for save in saves if (seconds := _saving(save)) is not None] if isinstance(saves, list) else []
    return (spent[-1] - spent[0]) / (len(spent) - 1) if len(spent) > 1 and spent[-1] > spent[0] else None


def _saving(save: Any) -> float | None:
    """The seconds that a run had spent on saving, by one entry of its list of saves."""
    seconds = save.get("seconds") if isinstance(save, dict) else None
    spent = seconds.get("saving") if isinstance(seconds, dict) else None
    return float(spent) if isinstance(spent, int | float) else None


def save_every_minutes(*, save_seconds: float, mtbf_hours: float) -> float:
    """Young's interval in minutes, rounded to a tenth.

    Args:
        save_seconds: time that a save keeps the devices from computing.
        mtbf_hours: mean time between failures of the whole job.

    Returns:
        Minutes, as `checkpoint.every_minutes` takes them.

    Raises:
        ConfigError: a time that is not above 0, or saves that take longer than passes between failures.
    """
    for option, value in (("--save-seconds", save_seconds), ("--mtbf-hours", mtbf_hours)):
        if not 0 < value < 10**6:
            raise ConfigError(f"{option} {value:g} is not a time above 0; write it as in {option} 30")
    if save_seconds >= mtbf_hours * 3600:
        raise ConfigError(
            f"a save of {save_seconds:g} s takes longer than the {mtbf_hours:g} h between two failures (--mtbf-hours); "
            "use fewer nodes, or a faster file system"
        )
    minutes = young_interval(save_seconds, mtbf_hours * 3600) / 60
    return min(max(round(minutes, 1), _LEAST_MINUTES), _MOST_MINUTES)
