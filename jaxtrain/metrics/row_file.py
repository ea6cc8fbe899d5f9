"""A file of JSON rows that holds whole rows only, and that can be read although its name is gone."""

import contextlib
import errno
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path

from jaxtrain.runtime.files import identity, put_aside, write_bytes_atomic


class RowFile:
    """Appends rows to a file, which is opened with the first one.

    Args:
        path: of the file; its folder is made if need be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None

    def close(self) -> None:
        """Close the file; the next row opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def append(self, row: Mapping[str, object]) -> None:
        """Write a row, all of it or nothing.

        Raises:
            OSError: it cannot be written; the file is as it was.
        """
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        file = self._open()
        size = file.seek(0, os.SEEK_END)
        try:
            # A disk that fills up takes the beginning of a line without an error.
            written = file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise

    def is_in_place(self) -> bool:
        """Whether the file that is open is the one at its path; True where none is open."""
        if self._file is None:
            return True
        found = os.fstat(self._file.fileno())
        return identity(self.path) == (found.st_dev, found.st_ino)

    def content(self) -> bytes | None:
        """Return what the open file holds, although its name may be gone; None where it cannot be read."""
        if self._file is None:
            return b""
        try:
            self._file.seek(0)
            return self._file.read()
        except OSError:
            return None

    def replace(self, content: bytes) -> None:
        """Write the file at its path anew, and go on there.

        Raises:
            OSError: it cannot be written.
        """
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        put_aside(self.path)
        write_bytes_atomic(self.path, content)
        self._open()

    def _open(self) -> io.FileIO:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            put_aside(self.path)
            self._file = io.FileIO(os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
        return self._file
