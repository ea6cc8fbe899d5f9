"""Numbers as short text for users: durations, counts and sizes."""

import math


def format_duration(seconds: float | None) -> str:
    """Format a duration as `0.42 s`, `3.1 s`, `1:24`, `2:05:09` or `3 d 4:05`; None and infinities give a dash."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return format_clock(seconds)


def format_clock(seconds: float | None) -> str:
    """Format a duration as a clock, for a remaining time that counts down: `0:24`, `1:05:09`, `3 d 4:05`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour}:{minute:02d}"
    if hours:
        return f"{hours}:{minute:02d}:{second:02d}"
    return f"{minute}:{second:02d}"


def format_loss(loss: float) -> str:
    """Format a loss with three decimals, very small and very large ones with three digits: `2.345`, `3.2e-04`."""
    return f"{loss:.3f}" if loss == 0 or 0.01 <= abs(loss) < 1e4 else f"{loss:.3g}"


def format_count(count: float | None) -> str:
    """Format a count with three digits and a decimal suffix: `999`, `12.1k`, `8.03B`; None gives a dash."""
    if count is None or not math.isfinite(count):
        return "-"
    if count < 0:
        return "-" + format_count(-count)
    for factor, suffix in ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "B"), (1e12, "T")):
        # 999.5 and not 1000, because a number that rounds to 1000 belongs to the next suffix.
        if count / factor < 999.5 or suffix == "T":
            scaled = count / factor
            break
    if not suffix and float(scaled).is_integer():
        return f"{scaled:.0f}"
    decimals = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{decimals}f}{suffix}"


def format_bytes(count: float | None) -> str:
    """Format bytes in binary units: `512 B`, `1.5 MiB`, `71.2 GiB`; None gives a dash."""
    if count is None or not math.isfinite(count):
        return "-"
    scaled, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(scaled) < 1024:
            break
        scaled, unit = scaled / 1024, larger
    return f"{scaled:.0f} B" if unit == "B" else f"{scaled:.1f} {unit}"


def format_gib(count: float) -> str:
    """Format bytes in GiB with two decimals: `15.75 GiB`."""
    return f"{count / 2**30:,.2f} GiB"
