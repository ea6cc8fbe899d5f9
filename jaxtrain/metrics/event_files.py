"""Event files of TensorBoard on a disk that may be full: an event that cannot be written is dropped, and no more.

tensorboardX writes in a thread of its own. An error there ends the thread with a traceback, and training waits for ever
once its queue of ten events is full. So what it writes to is a file of ours, which keeps errors to itself.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.runtime.files import plain_number

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

# tensorboardX chooses what opens a path by what stands before its first colon.
PREFIX = "jaxtrain-events"


class EventFile:
    """A file that takes bytes and loses those that cannot be written.

    Args:
        path: of the file, with the prefix.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path.removeprefix(f"{PREFIX}:"))
        self._descriptor: int | None = None
        self._waiting = b""
        self._size = 0

    def write(self, part: bytes) -> int:
        """Take bytes; they are written by `flush`, since a record comes in four parts that belong together."""
        self._waiting += part
        return len(part)

    def flush(self) -> None:
        """Write what was taken, all of it or nothing."""
        part, self._waiting = self._waiting, b""
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.write(self._descriptor, part) == len(part):
                self._size += len(part)
                os.fsync(self._descriptor)
            else:
                os.ftruncate(self._descriptor, self._size)
        except OSError:
            if self._descriptor is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
                    os.lseek(self._descriptor, self._size, os.SEEK_SET)

    def close(self) -> None:
        """Write what is left, and close."""
        self.flush()
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                os.close(descriptor)


class EventFiles:
    """Opens such files for tensorboardX."""

    def open(self, path: str) -> EventFile:
        return EventFile(path)

    def directory_check(self, path: str) -> None:
        with contextlib.suppress(OSError):
            Path(path.removeprefix(f"{PREFIX}:")).mkdir(parents=True, exist_ok=True)


def event_directory(directory: Path) -> str:
    """Return the directory as tensorboardX takes it, so that its events go through these files."""
    from tensorboardX.record_writer import register_writer_factory

    register_writer_factory(PREFIX, EventFiles())
    return f"{PREFIX}:{directory}"


class TensorBoardWriter:
    """Writes TensorBoard events through tensorboardX: numbers and texts, and nothing for None.

    Args:
        directory: of the events.
        resumed_step: steps done before this process; TensorBoard hides later events of an interrupted run.
    """

    def __init__(self, directory: Path, *, resumed_step: int = 0):
        self._directory = Path(directory)
        self._resumed_step = resumed_step
        self._writer: SummaryWriter | None = None

    def scalars(self, step: int, values: Mapping[str, float | int | None]) -> None:
        writer = self._open()
        for name, value in values.items():
            number = plain_number(value)
            if number is not None and name != "step":
                writer.add_scalar(name, number, step)

    def text(self, step: int, name: str, text: str) -> None:
        # TensorBoard renders Markdown; four spaces make it show a sample unchanged.
        self._open().add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> "SummaryWriter":
        if self._writer is None:
            # Imported at the first row, so that the first step does not wait for the import.
            from tensorboardX import SummaryWriter

            # A purge step makes TensorBoard hide what an interrupted run wrote after the resumed step.
            purge = self._resumed_step + 1 if self._resumed_step else None
            folder = event_directory(self._directory)
            self._writer = SummaryWriter(logdir=folder, purge_step=purge, write_to_disk=True)
        return self._writer
