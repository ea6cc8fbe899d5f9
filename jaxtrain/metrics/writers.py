"""Where metrics are written: a file that is always written, and TensorBoard events by choice."""

import base64
import contextlib
import errno
import json
import math
import os
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from jaxtrain.config.arguments import local_path
from jaxtrain.config.schema import LoggingConfig
from jaxtrain.errors import ConfigError, StorageError
from jaxtrain.metrics.history import read_rows
from jaxtrain.runtime.files import plain_number, write_lines_atomic

Scalars = Mapping[str, float | int | None]

# Rows that wait while they cannot be written; at a row per second these are three hours.
MOST_WAITING = 10_000
# What a kill may cost TensorBoard and the trackers until the run goes on.
COLLECTED_SECONDS = 1.0
# Rows that were written later than this many rows before a kill are written to TensorBoard again.
_ROWS_WRITTEN_AGAIN = 1000
_END_SECONDS = 30.0
# Between tries to write to a disk that is full.
_PAUSE_SECONDS = 60.0


class Row(NamedTuple):
    """What is recorded of one step, and when, in seconds since 1970.

    A value is a number, None (not known), text, or {"counts", "edges"} of a histogram, {"png"} of an image.
    """

    step: int
    seconds: float
    values: Mapping[str, Any]


def flat_scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten metrics to one number per name; entry i of a vector `name` becomes `name_i`, of a matrix `name_i_j`.

    A ConfigError says where an entry of an array gets the name of another metric.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or np.ndim(value) == 0:
            found = {name: value if value is None or isinstance(value, (int, float)) else np.asarray(value).item()}
        else:
            entries = np.ndenumerate(np.asarray(value))
            found = {"_".join(map(str, (name, *index))): entry.item() for index, entry in entries}
        double = next((one for one in found if one in flat), None)
        if double is not None:
            raise ConfigError(f"two metrics are recorded as {double!r}, one an entry of an array; rename one of them")
        flat |= found
    return flat


class JsonlWriter:
    """Writes one strict JSON object per line, with `step` first; NaN and infinities become null.

    Each line is appended by itself, so that a run that is killed loses at most its last line, and one whose directory
    was deleted makes it again.

    Args:
        path: the file of metrics; its folder is made if need be.

    Example:
        >>> with jt.JsonlWriter("runs/mine/metrics.jsonl") as writer:
        ...     writer.scalars(1, {"loss": 2.5})
        >>> print(writer.path.read_text(), end="")
        {"step": 1, "loss": 2.5}
    """

    def __init__(self, path: str | Path):
        self.path = local_path(path, what="file of metrics")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def scalars(self, step: int, values: Scalars) -> None:
        """Write the numbers of one step, of Python, NumPy or JAX; None is a value that is not known.

        Raises:
            TypeError: a value is no number.
            OSError: the row cannot be written; the file is as it was.
        """
        finite = {name: value is not None and math.isfinite(value) for name, value in values.items()}
        numbers = {name: plain_number(value) if finite[name] else None for name, value in values.items()}
        self.append({"step": int(step), **numbers})

    def text(self, step: int, name: str, text: str | Mapping[str, Any]) -> None:
        """Write a text, a histogram or an image of one step; see `scalars`."""
        self.append({"step": int(step), name: text})

    def append(self, row: Mapping[str, object]) -> None:
        """Write a row of JSON values, all of it or nothing; see `scalars`."""
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                # A disk that fills up takes the beginning of a line without an error.
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise

    def truncate_after(self, step: int) -> None:
        """Drop the rows of steps after `step`, which a run repeats, and incomplete lines; replaces it atomically."""
        if self.path.exists() and any(not _is_kept(line, step) for line in self._lines()):
            write_lines_atomic(self.path, (line for line in self._lines() if _is_kept(line, step)))

    def close(self) -> None:
        """Do what is left to do: nothing, since each row is in the file once it was given."""

    def _lines(self) -> Iterator[str]:
        with self.path.open(encoding="utf-8", errors="replace") as file:
            yield from file


def _is_kept(line: str, last_step: int) -> bool:
    """Whether a line is a complete row of a step up to `last_step`."""
    found = re.match(r'\{"step": (\d+)[,}].*\}\n', line)
    return found is not None and int(found[1]) <= last_step


class LastingWriter(JsonlWriter):
    """Writes the rows of a run: those that cannot be written, as on a full disk, wait for the next one.

    `report` is called with one line when rows begin to wait, and when they are written.
    """

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        super().__init__(path)
        self._report = report
        self._waiting: list[Mapping[str, object]] = []
        self._lost, self._reason = 0, ""

    def append(self, row: Mapping[str, object]) -> None:
        self._waiting.append(row)
        if len(self._waiting) > MOST_WAITING:
            del self._waiting[0]
            self._lost += 1
        was_waiting, self._reason = self._reason, ""
        try:
            while self._waiting:
                super().append(self._waiting[0])
                del self._waiting[0]
        except OSError as error:
            self._reason = error.strerror or str(error)
        if self._reason and not was_waiting:
            self._report(f"{self.path} cannot be written: {self._reason}; training continues; rows stay in memory")
        elif was_waiting and not self._reason:
            self._report(f"metrics are written to {self.path} again, including the rows in memory")

    def close(self) -> None:
        """Write the rows that wait, and close the file.

        Raises:
            StorageError: rows are lost, or still cannot be written.
        """
        if self._waiting:
            self.append(self._waiting.pop())
        super().close()
        if missing := len(self._waiting) + self._lost:
            raise StorageError(
                f"{missing} rows of metrics could not be written to {self.path}: {self._reason or 'for too long'}; "
                "free space, and train the steps again for them"
            )


class Background:
    """Takes rows into a queue that a daemon thread empties by `_work`: nothing that is slow keeps a step waiting.

    `earlier` is the metrics.jsonl of a run that goes on; what it holds now is in `_earlier_rows`.
    """

    def __init__(self, name: str, earlier: Path | None) -> None:
        self._earlier = earlier
        # What this process appends to the file comes through the queue.
        self._earlier_bytes = earlier.stat().st_size if earlier is not None and earlier.is_file() else 0
        self._waiting: deque[Row] = deque()
        self._dropped = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def scalars(self, step: int, values: Scalars) -> None:
        self._put(Row(step, time.time(), dict(values)))

    def text(self, step: int, name: str, text: str | Mapping[str, Any]) -> None:
        self._put(Row(step, time.time(), {name: text}))

    def _put(self, row: Row) -> None:
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(row)
        else:
            self._dropped += 1
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Have what waits written; a disk that hangs is left to itself after 30 s."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)

    def _work(self) -> None:
        raise NotImplementedError

    def _batches(self) -> Iterator[list[Row]]:
        """The rows that are put, collected for a second at a time, until `_ending` is set."""
        is_last = False
        while not is_last:
            is_last = self._ending.wait(COLLECTED_SECONDS)
            while rows := [self._waiting.popleft() for _ in range(min(200, len(self._waiting)))]:
                yield rows

    def _earlier_rows(self) -> Iterator[Row]:
        """The rows so far; when they were recorded is not known any more."""
        if self._earlier is not None:
            for row in read_rows(self._earlier, num_bytes=self._earlier_bytes):
                yield Row(row.pop("step"), time.time(), row)


Writer = JsonlWriter | Background


class MultiWriter:
    """Gives every row to each of several writers, in their order."""

    def __init__(self, writers: Iterable[Writer]):
        self.writers: Sequence[Writer] = tuple(writers)

    def scalars(self, step: int, values: Scalars) -> None:
        for writer in self.writers:
            writer.scalars(step, values)

    def text(self, step: int, name: str, text: str | Mapping[str, Any]) -> None:
        for writer in self.writers:
            writer.text(step, name, text)

    def close(self) -> None:
        """Close every writer, even where closing one fails."""
        with contextlib.ExitStack() as stack:
            for writer in reversed(self.writers):
                stack.callback(writer.close)


class TensorBoardWriter(Background):
    """Writes TensorBoard events, nothing for None. Rows that a kill kept from the files are written again.

    tensorboardX's own writer takes 40 times as long a row, in the thread that trains, and its thread ends at an error
    of the disk; so its records are used, and its messages.
    TensorBoard hides what an interrupted run wrote after `resumed_step`; `earlier` is the metrics.jsonl of that run.
    """

    def __init__(self, directory: Path, *, resumed_step: int = 0, earlier: Path | None = None):
        super().__init__("tensorboard", earlier)
        self._directory, self._resumed_step = Path(directory), resumed_step

    def _work(self) -> None:
        records, rows = None, self._written_again()
        first = rows[0].step if rows else self._resumed_step + bool(self._resumed_step)
        for batch in self._batches():
            rows = [*rows, *batch][-MOST_WAITING:]
            try:
                records = records or self._new_file(first)
                for row in rows:
                    records.write(_event(row).SerializeToString())
                records.flush()
                rows = []
            except OSError:
                # Half a record ends what TensorBoard reads of a file: go on in another one, which hides the same steps.
                first = rows[0].step
                with contextlib.suppress(OSError):
                    if records is not None:
                        records.close()
                records = None
                self._ending.wait(_PAUSE_SECONDS)
        if records is not None:
            records.close()

    def _new_file(self, first: int) -> Any:
        """A file of records, in which TensorBoard shows steps instead of the earlier files from a first step on."""
        from tensorboardX.record_writer import RecordWriter

        messages = import_module("tensorboardX.proto.event_pb2")
        self._directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names.
        seconds = [int(path.name.split(".")[3]) for path in self._directory.glob("events.out.tfevents.*")]
        second = max([int(time.time()), *(found + 1 for found in seconds)])
        records = RecordWriter(str(self._directory / f"events.out.tfevents.{second:010d}.{socket.gethostname()}"))
        start = messages.SessionLog(status=messages.SessionLog.START)
        for content in ({"file_version": "brain.Event:2"}, {"session_log": start}):
            records.write(messages.Event(wall_time=time.time(), step=first, **content).SerializeToString())
        return records

    def _written_again(self) -> list[Row]:
        """The newest rows so far, which the files may lack; all of them where there are no files."""
        if not any(self._directory.glob("*tfevents*")):
            return list(self._earlier_rows())
        newest = deque((row.step for row in self._earlier_rows()), maxlen=_ROWS_WRITTEN_AGAIN)
        return [row for row in self._earlier_rows() if row.step >= newest[0]] if newest else []


def _event(row: Row) -> Any:
    """The event of a row; characters that TensorBoard does not take in names become others."""
    from tensorboardX import summary

    event = import_module("tensorboardX.proto.event_pb2").Event(wall_time=row.seconds, step=row.step)
    for name, value in row.values.items():
        if isinstance(value, str):
            # TensorBoard renders Markdown; four spaces make it show a sample unchanged.
            found = summary.text(name, "\n".join(f"    {line}" for line in value.splitlines()))
        elif isinstance(value, Mapping):
            found = _media(name, value)
        elif name != "step" and (number := plain_number(value)) is not None:
            found = summary.scalar(name, number)
        else:
            continue
        event.summary.value.extend(found.value)
    return event


def _media(name: str, value: Mapping[str, Any]) -> Any:
    from tensorboardX import summary

    if "png" in value:
        content = base64.b64decode(value["png"])
        width, height = struct.unpack(">II", content[16:24])  # of the header
        messages = import_module("tensorboardX.proto.summary_pb2")
        image = messages.Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
        return messages.Summary(value=[messages.Summary.Value(tag=name, image=image)])
    counts, edges = np.array(value["counts"], float), np.array(value["edges"], float)
    middles = (edges[:-1] + edges[1:]) / 2
    sums = (counts.sum(), (counts * middles).sum(), (counts * middles**2).sum())
    return summary.histogram_raw(name, edges[0], edges[-1], *sums, edges[1:].tolist(), counts.tolist())


def open_writers(
    run_dir: Path, config: LoggingConfig, *, resumed_step: int, report: Callable[[str], None] = print
) -> MultiWriter:
    """Open the writers of `metrics.jsonl`, a `LastingWriter` and first, and of `tensorboard/`, if it is wanted.

    Rows after `resumed_step`, the steps done before this process, are dropped first. `report` is called with one line
    where rows cannot be written.
    """
    metrics = LastingWriter(run_dir / "metrics.jsonl", report)
    metrics.truncate_after(resumed_step)
    writers: list[Writer] = [metrics]
    if config.tensorboard:
        directory = run_dir / "tensorboard"
        writers.append(TensorBoardWriter(directory, resumed_step=resumed_step, earlier=metrics.path))
    return MultiWriter(writers)
