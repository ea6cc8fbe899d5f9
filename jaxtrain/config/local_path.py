"""Tells paths on this machine from addresses of object stores, which would be created as folders. No jax here."""

import os
import re
from pathlib import Path

from jaxtrain.config.arguments import refusal, shown
from jaxtrain.errors import ConfigError, UserError

# At least two letters, so that a drive (C:/) is no scheme; one slash, because a `Path` has dropped the second.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


# Limits of file systems and of the system's calls.
_MOST_BYTES_OF_A_NAME, _MOST_BYTES = 255, 4096


_INSTEAD = "use a local folder, or mount the store and give its folder"


def local_path(
    path: str | os.PathLike[str], *, what: str, error: type[UserError] = ConfigError, instead: str = _INSTEAD
) -> Path:
    """Returns the path of a file or folder on this machine.

    Args:
        path: What the user gave.
        what: Name of the path in the message, such as "run directory".
        error: Type of the error.
        instead: What to do where it is the address of a store, for the message.

    Returns:
        The path, unchanged.

    Raises:
        UserError: It is no path, or the address of an object store or of another place that is not a file system.
    """
    if not isinstance(path, str | os.PathLike):
        raise error(refusal(what, "a path", path, "it as text, such as 'runs/mine'"))
    text = os.fspath(path)
    reason = _mistake(text)
    if reason is not None:
        raise error(f"{what} {shown(text)} {reason}")
    found = _SCHEME.match(text)
    if found is not None:
        scheme, rest = found[1].lower(), text[found.end() :].lstrip("/")
        if scheme == "file":
            raise error(f"{what} file:///{rest} is an address; write it as a path: /{rest}")
        raise error(f"{what} {scheme}://{rest} is not a path on this machine; {instead}")
    return Path(path)


def _mistake(text: str) -> str | None:
    """What keeps a text from being any path of this machine."""
    if not text:
        return "is empty; write a path, or leave it out"
    if "\0" in text:
        return "holds a NUL character, which no path does; leave it out"
    try:
        parts = [len(os.fsencode(part)) for part in text.split("/")]
    except UnicodeEncodeError:
        return "holds characters that no path on this machine can have; rename it"
    if max(parts) > _MOST_BYTES_OF_A_NAME or sum(parts) + len(parts) > _MOST_BYTES:
        return f"has {len(text)} characters; a name in a path has at most {_MOST_BYTES_OF_A_NAME} bytes"
    return None
