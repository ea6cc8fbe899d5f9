"""Reads files that are compressed with gzip or zstd in bounded memory."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxtrain.errors import DataError

# Endings of files that are decompressed while they are read, from their beginning to their end.
PACKED_SUFFIXES = (".gz", ".zst")

# A file of kilobytes can claim terabytes: no single document is longer than this.
MAX_UNPACKED_BYTES = 2**32
_BUFFER_BYTES = 2**20


def is_packed(path: Path) -> bool:
    """Returns whether a file is decompressed while it is read, by the ending of its name."""
    return path.suffix in PACKED_SUFFIXES


def plain_suffix(path: Path) -> str:
    """Returns the ending of a file's name, without that of its compression: `.jsonl` of `a.jsonl.gz`."""
    return path.with_suffix("").suffix if is_packed(path) else path.suffix


@contextlib.contextmanager
def open_unpacked(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file for reading its content, decompressed where its name ends in .gz or .zst.

    Args:
        path: The file; several compressed parts after one another are one content.

    Yields:
        The content, and the file itself, whose position says how much of it was read.

    Raises:
        DataError: pyarrow, which decompresses zstd, is not installed. Reading raises `UNPACKING_ERRORS` where the file
            is damaged or truncated (`damaged` says so in one line).
        OSError: It cannot be opened.
    """
    with path.open("rb") as file:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=file) as content:
                yield content, file  # pyright: ignore[reportReturnType] a binary file in all but its declared type
        elif path.suffix == ".zst":
            try:
                import pyarrow
            except ImportError:
                raise DataError(f"{path} needs pyarrow; run: pip install 'jaxtrain[data]'") from None
            packed = pyarrow.PythonFile(file, mode="r")
            stream = pyarrow.CompressedInputStream(packed, "zstd")
            with io.BufferedReader(_Unpacked(stream), _BUFFER_BYTES) as content:
                yield content, file  # pyright: ignore[reportReturnType] as above
        else:
            yield file, file


def damaged(path: Path, error: Exception) -> DataError:
    """Returns the error for a file that could not be read or decompressed to its end."""
    if isinstance(error, OSError) and error.errno is not None:
        return DataError(f"{path} cannot be read ({error.strerror}); check its permissions")
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    if "memory" in reason.lower() and path.suffix == ".zst":
        return DataError(
            f"{path} needs more memory to decompress than 128 MiB ({reason}); compress it again without --long, or "
            f"with: zstd -d --long=31 {path.name}"
        )
    tool = "gunzip -t" if path.suffix == ".gz" else "zstd -t"
    return DataError(f"{path} is damaged or truncated ({reason}); check it with {tool} {path.name}, and fetch it again")


UNPACKING_ERRORS = (OSError, EOFError, zlib.error)
"""What reading a damaged compressed file raises."""


def read_unpacked(path: Path) -> bytes:
    """Returns the whole content of a file, decompressed.

    Raises:
        DataError: It is damaged, truncated, or longer than 4 GiB.
    """
    try:
        with open_unpacked(path) as (file, _):
            content = file.read(MAX_UNPACKED_BYTES + 1)
    except UNPACKING_ERRORS as error:
        raise damaged(path, error) from None
    if len(content) > MAX_UNPACKED_BYTES:
        raise DataError(f"{path} unpacks to more than {MAX_UNPACKED_BYTES:,} bytes, as one document; split it")
    return content


class _Unpacked(io.RawIOBase):
    """A decompressing stream of pyarrow with the methods of Python's files."""

    def __init__(self, stream: Any):
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        content = self._stream.read(len(view))
        view[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
