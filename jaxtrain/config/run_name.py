"""What the name of a run may be: the name of a folder below runs/, and a text for terminals. No jax here."""

# Names of files have at most 255 bytes, and files that are written beside the folder get a few more.
_MOST_BYTES = 200


def check_run_name(name: str) -> str:
    """Returns the name of a run as it is.

    Args:
        name: May have several parts, as in "sweep/lr_0.1", which are folders inside each other.

    Raises:
        ValueError: It is empty, would lead out of runs/, is too long, or holds characters that are not shown.
    """
    reason = _mistake(name)
    if reason is not None:
        raise ValueError(f"{_shortened(name)} {reason}; use letters, digits, '-', '_' and '.', such as name=my_run")
    return name


def _shortened(name: str) -> str:
    return repr(name) if len(name) <= 60 else f"{name[:60]!r}..."


def _mistake(name: str) -> str | None:
    parts = name.split("/")
    if name.startswith("/"):
        return "is a path of its own, and the folder of a run lies below runs/ (--run-dir takes any path)"
    if ".." in parts or "." in parts:
        return "leads out of its folder below runs/ (--run-dir takes any path)"
    if not name.strip() or "" in parts:
        return "is empty, or has an empty part"
    if any(part != part.strip() for part in parts):
        return "begins or ends with a space"
    if not name.isprintable():
        return "holds characters that are not shown, such as line ends or escape codes"
    if "\\" in name:
        return "holds a backslash"
    if any(len(part.encode("utf-8", "surrogatepass")) > _MOST_BYTES for part in parts):
        return f"has more than {_MOST_BYTES} bytes"
    return None
