"""Times and money of a plan in words. No jax here."""

from jaxtrain.metrics.format import format_duration
from jaxtrain.plan.cost.spot import Spot

UNKNOWN = "not known"


def why_not_sensible(spot: Spot) -> str:
    """What keeps a run on spot devices from its work: interruptions, or saves that take longer than it."""
    if not spot.is_mostly_saving:
        return f"interrupted every {hours(spot.hours / spot.interruptions)}"
    save = hours(spot.save_seconds / 3600)
    if spot.segment_seconds < spot.checkpoint_interval_seconds:
        return f"the run is shorter than a save, which takes {save}"
    return f"a save, after every {hours(spot.segment_seconds / 3600)} of work, takes {save}"


def hours(count: float) -> str:
    """A time with its unit: hours, or minutes or seconds where it is less than one of the larger."""
    if count < 1 / 60:
        return format_duration(3600 * count)
    if count < 1:
        return f"{60 * count:.3g} minutes"
    return f"{count:,.1f} hours" if count >= 10 else f"{count:.3g} hours"


def dollars(usd: float | None) -> str:
    """An amount of US dollars, with cents where they count."""
    if usd is None:
        return UNKNOWN
    if 0 < usd < 0.005:
        return "under $0.01"
    return f"${usd:,.0f}" if usd >= 100 else f"${usd:.2f}"
