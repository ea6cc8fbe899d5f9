"""Folders that are written for other tools. No jax here."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.errors import ConfigError


def check_empty(folder: Path) -> None:
    """Raises ConfigError where a folder is there already and not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and not empty; name a new folder")


@contextlib.contextmanager
def empty_folder(folder: Path) -> Iterator[None]:
    """Raises on entering where a folder is there already and not empty."""
    check_empty(folder)
    yield


def make_folder(folder: Path) -> None:
    """Makes a folder; raises ConfigError where the file system refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror or error}); name another folder") from None
