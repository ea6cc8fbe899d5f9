"""Folders that are written for other tools, and arrays gathered for them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

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


def on_host(array: Any) -> np.ndarray:
    """Returns a whole array on the host, whichever processes hold its shards; each of them calls this."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)
