"""Paths on this machine, as against addresses of object stores, which would become folders. No jax here."""

import os
import re
from pathlib import Path

from jaxtrain.errors import ConfigError, UserError

# A scheme of two letters or more, so that a drive (C:/) is none; a `Path` has already dropped one of the slashes.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local_path(path: str | os.PathLike[str], *, what: str, error: type[UserError] = ConfigError) -> Path:
    """Returns the path of a file or folder on this machine.

    Args:
        path: What the user gave.
        what: Names it in the message, such as "run directory".
        error: Type of the error.

    Raises:
        UserError: The path is the address of an object store or another place that is no file system.
    """
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
