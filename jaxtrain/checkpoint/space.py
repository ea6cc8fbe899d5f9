"""Whether a disk has room for a checkpoint, asked before it is written. No jax here."""

import errno
import os

from jaxtrain.checkpoint.places import Place
from jaxtrain.checkpoint.remote import RemotePath
from jaxtrain.errors import CheckpointError

# What a step takes beside its arrays: the record, the tables of Orbax, blocks that are not full.
_BESIDE_BYTES = 256 * 2**10
_BESIDE_FRACTION = 0.02


class SaveError(CheckpointError):
    """A step could not be saved, because of the disk or of what is in its place; the steps before it are kept."""


def needed_bytes(array_bytes: int) -> int:
    """Returns the bytes that a step of so many bytes of arrays takes on a disk, at most.

    Orbax compresses, which saves a tenth of random floats and much of zeros; what it saves is not known before.
    """
    return int(array_bytes * (1 + _BESIDE_FRACTION)) + _BESIDE_BYTES


def free_bytes(folder: Place) -> int | None:
    """Returns the bytes that this user may write where a folder is, or would be; None: the place does not say."""
    if isinstance(folder, RemotePath):
        return None
    for place in (folder, *folder.parents):
        try:
            found = os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        # Some network and virtual file systems report no sizes at all.
        return found.f_bavail * found.f_frsize if found.f_blocks else None
    return None


def check_space(folder: Place, array_bytes: int, *, what: str) -> None:
    """Raises where a step does not fit.

    Args:
        folder: That the step would be written to.
        array_bytes: Bytes of its arrays.
        what: The start of the message, such as "cannot save checkpoint runs/x/checkpoints/40".

    Raises:
        SaveError: It names the bytes that are needed and those that are free.
    """
    free, needed = free_bytes(folder), needed_bytes(array_bytes)
    if free is not None and free < needed:
        raise SaveError(
            f"{what}: {os.strerror(errno.ENOSPC)}: it takes {_text(needed)}, and {_text(free)} are free in {folder}"
        )


def _text(count: int) -> str:
    if count < 2**20:
        return f"{count / 2**10:.0f} KiB"
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"
