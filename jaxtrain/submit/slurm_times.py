"""Times as Slurm writes them, in seconds. No jax here."""

import re

from jaxtrain.errors import ConfigError

_FORMS = "minutes (90), hours:minutes:seconds (12:00:00), days-hours (2-0) or days-hours:minutes (2-12:30)"


def parse_time(text: str, *, option: str) -> int:
    """Read a limit of time in one of Slurm's forms.

    Args:
        text: `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`, `days-hours:minutes` or
            `days-hours:minutes:seconds`.
        option: what it was given to, for the message.

    Returns:
        Seconds, 1 or more.

    Raises:
        ConfigError: it has none of these forms, or is no time at all.
    """
    found = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,7})(?::(\d{1,2}))?(?::(\d{1,2}))?", text, re.ASCII)
    if found is None:
        raise ConfigError(f"{option} {text!r} is not a time; write {_FORMS}")
    days, *parts = (None if part is None else int(part) for part in found.groups())
    first, second, third = parts
    assert first is not None
    if days is not None:
        seconds = ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    elif third is not None:
        seconds = (first * 60 + (second or 0)) * 60 + third
    else:
        seconds = first * 60 + (second or 0)
    if not seconds:
        raise ConfigError(f"{option} {text} leaves no time to train; write {_FORMS}")
    return seconds


def parse_partition_limit(text: str) -> int | None:
    """Read the limit of a partition as `sinfo` prints it; None where there is none, or it is not known."""
    try:
        return parse_time(text.strip(), option="limit")
    except ConfigError:
        return None


def shown_time(seconds: int) -> str:
    """A time as Slurm prints it: `1-02:30:00`, or `02:30:00` under a day."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02}:{minute:02}:{second:02}"
    return f"{days}-{clock}" if days else clock
