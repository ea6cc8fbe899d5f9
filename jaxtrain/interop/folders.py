"""Folders that are written for other tools. No jax here."""

import contextlib
import shutil
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


def partial_of(folder: Path) -> Path:
    """Where a folder is written until it is whole: beside it, so that it is renamed in one move."""
    place = folder.resolve()
    return place.with_name(f".{place.name}.partial")


@contextlib.contextmanager
def partial_folder(folder: Path) -> Iterator[None]:
    """Makes the folder that is written into, and removes it where `name_folder` did not rename it.

    Raises:
        ConfigError: The folder that is asked for is not empty, or the file system refuses.
    """
    check_empty(folder)
    partial = partial_of(folder)
    try:
        # What an export that was killed has left.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror or error}); name another folder") from None
    try:
        yield
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def name_folder(folder: Path, *, last: str) -> None:
    """Gives what was written beside a folder its name.

    Args:
        folder: That was asked for.
        last: The file that says that a folder is whole.
    """
    partial, place = partial_of(folder), folder.resolve()
    if place.exists():
        # An empty folder stays the one that it is (somebody may be in it).
        for file in sorted(partial.iterdir(), key=lambda file: file.name == last):
            file.replace(place / file.name)
    else:
        partial.rename(place)
