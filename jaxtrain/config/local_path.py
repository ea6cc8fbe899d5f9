"""Tells paths on this machine from addresses of object stores, which would be created as folders. No jax here."""

import os
import re
from pathlib import Path

from jaxtrain.config.arguments import refusal
from jaxtrain.errors import ConfigError, UserError

# At least two letters, so that a drive (C:/) is no scheme; one slash, because a `Path` has dropped the second.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local_path(path: str | os.PathLike[str], *, what: str, error: type[UserError] = ConfigError) -> Path:
    """Returns the path of a file or folder on this machine.

    Args:
        path: What the user gave.
        what: Name of the path in the message, such as "run directory".
        error: Type of the error.

    Returns:
        The path, unchanged.

    Raises:
        UserError: It is no path, or the address of an object store or of another place that is not a file system.
    """
    if not isinstance(path, str | os.PathLike):
        raise error(refusal(what, "a path", path, "it as text, such as 'runs/mine'"))
    text = os.fspath(path)
    found = _SCHEME.match(text)
    if found is not None:
        scheme, rest = found[1].lower(), text[found.end() :].lstrip("/")
        if scheme == "file":
            raise error(f"{what} file:///{rest} is an address; write it as a path: /{rest}")
        raise error(
            f"{what} {scheme}://{rest} is not a path on this machine; use a local folder, or mount the store and give "
            "its folder"
        )
    return Path(path)
