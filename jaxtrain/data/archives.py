"""Checks a NumPy archive before it is unpacked: a file of kilobytes can hold terabytes of zeros."""

import math
import os
import zipfile
from pathlib import Path

import numpy as np

from jaxtrain.errors import DataError


def check_archive(path: Path) -> None:
    """Checks that the arrays of a .npz file, unpacked, are what their headers say and fit into memory.

    Args:
        path: The file; any other than a zip archive is left to NumPy.

    Raises:
        DataError: They are not, or do not.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            claimed = {one.filename: one.file_size for one in members}
            total, memory = sum(claimed.values()), _memory_bytes()
            if total > memory:
                raise DataError(
                    f"{path} of {path.stat().st_size:,} bytes unpacks to {total:,}, and this machine has a memory of "
                    f"{memory:,}; write fewer rows, or token files (jaxtrain data prepare)"
                )
            for one in members:
                _check_header(archive, one, path)
    except DataError:
        raise
    except Exception:  # not a zip archive, or a damaged one, of which NumPy says what is wrong
        return


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> None:
    """Raises a DataError where the header of an array claims more numbers than its part of the archive holds."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        needed = math.prod(shape) * dtype.itemsize
        if not dtype.hasobject and needed > member.file_size:
            name = member.filename.removesuffix(".npy")
            raise DataError(
                f"{path} array '{name}' claims {needed:,} bytes {list(shape)} and holds {member.file_size:,}; write it "
                "again with numpy.savez"
            )


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
