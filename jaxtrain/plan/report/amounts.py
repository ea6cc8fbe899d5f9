"""Times and money of a plan in words. No jax here."""

from jaxtrain.metrics.format import format_duration

UNKNOWN = "not known"


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
