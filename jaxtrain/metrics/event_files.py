"""Event files of TensorBoard, written by a thread: no disk that is slow or full, and no kill, costs the training a row.

tensorboardX's own writer makes training wait once its queue of ten events is full, keeps events for two minutes, and
its thread ends at an error of the disk. So only the form of the events is its; when they are written is decided here.
"""

import base64
import contextlib
import itertools
import os
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.metrics.recorded import Row, Text, read_items
from jaxtrain.runtime.files import plain_number

# What a kill may cost the files until the run goes on.
_FLUSH_SECONDS = 1.0
# As with the other trackers: rows that wait for a disk that hangs, and what they have at the end of a run.
_MOST_WAITING = 10_000
_END_SECONDS = 30.0
_NAME = "events.out.tfevents"


class EventFile:
    """A file of events that loses those that cannot be written; it is made at the first flush.

    Args:
        directory: of the files, which TensorBoard reads in the order of their names.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None
        self._waiting, self._head = bytearray(), b""
        self._size = 0

    def begin(self, *events: bytes) -> None:
        """Take the events without which no other one of the file is written."""
        for event in events:
            self.add(event)
        self._head = bytes(self._waiting)

    def add(self, event: bytes) -> None:
        """Take an event; it is written by `flush`."""
        from tensorboardX.record_writer import masked_crc32c

        length = struct.pack("<Q", len(event))
        for part in (length, event):
            self._waiting += part + struct.pack("<I", masked_crc32c(part))

    def flush(self) -> None:
        """Write what was taken, all of it or nothing."""
        if not self._waiting:
            return
        part, self._waiting = bytes(self._waiting), bytearray()
        try:
            if self._descriptor is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                path = self._directory / f"{_NAME}.{self._seconds():010d}.{socket.gethostname()}"
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.write(self._descriptor, part) == len(part):
                os.fsync(self._descriptor)
                self._size += len(part)
            else:
                self._undo()
        except OSError:
            self._undo()

    def close(self) -> None:
        """Write what is left, and close."""
        self.flush()
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _undo(self) -> None:
        if not self._size:
            self._waiting[:0] = self._head
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
                os.lseek(self._descriptor, self._size, os.SEEK_SET)

    def _seconds(self) -> int:
        """The time for the name; after that of every earlier file, also where another host's clock was ahead."""
        found = (re.match(rf"{_NAME}\.(\d{{1,10}})\.", path.name) for path in event_files(self._directory))
        return max(int(time.time()), *(int(one[1]) + 1 for one in found if one), 0)


class TensorBoardWriter:
    """Writes TensorBoard events in a thread: numbers and texts, and nothing for None.

    The thread starts with the first row. In a run that goes on, it first writes what metrics.jsonl holds and the event
    files lack, because the process was killed before it wrote them.

    Args:
        directory: of the events.
        resumed_step: steps done before this process; TensorBoard hides later events of an interrupted run.
        earlier: metrics.jsonl of a run that goes on; None: nothing is looked for.
    """

    def __init__(self, directory: Path, *, resumed_step: int = 0, earlier: Path | None = None):
        self._directory, self._resumed_step = Path(directory), resumed_step
        self._earlier = earlier
        # What this process appends to the file comes through the queue.
        self._earlier_bytes = earlier.stat().st_size if earlier is not None and earlier.is_file() else 0
        self._waiting: deque[Row | Text] = deque()
        self._ending, self._given_up = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def scalars(self, step: int, values: Mapping[str, float | int | None]) -> None:
        self._put(Row(step, time.time(), {name: plain_number(value) for name, value in values.items()}))

    def text(self, step: int, name: str, text: str | Mapping[str, Any]) -> None:
        self._put(Text(step, name, text))

    def close(self) -> None:
        if self._thread is not None:
            self._ending.set()
            self._thread.join(_END_SECONDS)
            self._given_up.set()
            self._thread = None

    def _put(self, item: Row | Text) -> None:
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(item)
        if self._thread is None:
            self._ending.clear()
            self._thread = threading.Thread(target=self._work, name="tensorboard", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        messages = _messages()
        file = EventFile(self._directory)
        first = self._resumed_step + 1 if self._resumed_step else 0
        has_events, lacking = self._lacking()
        if lacking is not None:
            first = min(first, lacking)
        head = [messages.Event(wall_time=time.time(), file_version="brain.Event:2")]
        if has_events or self._resumed_step:
            # TensorBoard hides what earlier files hold of this step and later ones.
            start = messages.SessionLog(status=messages.SessionLog.START)
            head.append(messages.Event(wall_time=time.time(), step=first, session_log=start))
        file.begin(*(event.SerializeToString() for event in head))
        earlier = () if lacking is None else (item for item in self._earlier_items() if item.step >= first)
        self._write(file, earlier)
        is_last = False
        while not is_last and not self._given_up.is_set():
            is_last = self._ending.wait(_FLUSH_SECONDS)
            self._write(file, iter(self._next, None))
            file.flush()
        file.close()

    def _next(self) -> Row | Text | None:
        return self._waiting.popleft() if self._waiting else None

    def _write(self, file: EventFile, items: Iterable[Row | Text]) -> None:
        for count, item in enumerate(items, 1):
            if self._given_up.is_set():
                return
            if (event := _event(item)) is not None:
                file.add(event.SerializeToString())
            if count % 1000 == 0:
                file.flush()

    def _earlier_items(self) -> Iterator[Row | Text]:
        return iter(()) if self._earlier is None else read_items(self._earlier, self._earlier_bytes)

    def _lacking(self) -> tuple[bool, int | None]:
        """Whether there are event files, and the first step of the rows so far that they lack; None: they have all."""
        known, has_events = _known_steps(self._directory)
        tags = _Tags()
        tagged = ((item.step, tag) for item in self._earlier_items() for tag in tags.of(item))
        return has_events, min((step for step, tag in tagged if step not in known.get(tag, ())), default=None)


class _Tags:
    """The names that TensorBoard knows what is recorded by; characters that it does not take become others."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, str], str] = {}

    def of(self, item: Row | Text) -> Iterator[str]:
        names = (item.name,) if isinstance(item, Text) else _numbers(item)
        for name in names:
            key = type(item.text if isinstance(item, Text) else item), name
            if key not in self._known:
                one = item if isinstance(item, Text) else Row(0, 0.0, {name: 0.0})
                event = _event(one)
                assert event is not None, "it has a value"
                self._known[key] = event.summary.value[0].tag
            yield self._known[key]


def event_files(directory: Path) -> list[Path]:
    """The event files of a directory in the order in which TensorBoard reads them; none where it cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(path for path in directory.iterdir() if "tfevents" in path.name)
    return []


def read_events(path: Path) -> Iterator[Any]:
    """The complete events of a file.

    Args:
        path: of the file; one that cannot be read has none.
    """
    from google.protobuf.message import DecodeError

    read = _messages().Event.FromString
    with contextlib.suppress(OSError, DecodeError), path.open("rb") as file:
        # TFRecord: length (8 bytes), its checksum (4), payload, its checksum (4).
        while len(head := file.read(12)) == 12:
            size = int.from_bytes(head[:8], "little")
            # A length that is damaged may be any number of bytes.
            part = file.read(size + 4) if size <= os.fstat(file.fileno()).st_size else b""
            if len(part) != size + 4:
                return
            yield read(part[:-4])


def _known_steps(directory: Path) -> tuple[dict[str, set[int]], bool]:
    """The steps that TensorBoard shows of each tag, and whether there are files at all."""
    start = _messages().SessionLog.START
    files, known = event_files(directory), dict[str, set[int]]()
    for event in itertools.chain.from_iterable(map(read_events, files)):
        if event.HasField("session_log") and event.session_log.status == start:
            known = {tag: {step for step in steps if step < event.step} for tag, steps in known.items()}
        for value in event.summary.value:
            known.setdefault(value.tag, set()).add(event.step)
    return known, bool(files)


def _event(item: Row | Text) -> Any:
    """An event with the numbers of a row, or with a text; None where there are none."""
    from tensorboardX import summary

    new = _messages().Event
    if isinstance(item, Text):
        if isinstance(item.text, str):
            # TensorBoard renders Markdown; four spaces make it show a sample unchanged.
            found = summary.text(item.name, "\n".join(f"    {line}" for line in item.text.splitlines()))
        else:
            found = _media(item.name, item.text)
        return new(wall_time=time.time(), step=item.step, summary=found)
    event = new(wall_time=item.seconds, step=item.step)
    for name, number in _numbers(item).items():
        event.summary.value.extend(summary.scalar(name, number).value)
    return event if event.summary.value else None


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


def _numbers(row: Row) -> dict[str, float | int]:
    return {name: value for name, value in row.values.items() if value is not None and name != "step"}


def _messages() -> Any:
    """The messages of TensorBoard, which are made as they are imported: by the thread, so that no step waits for it."""
    return import_module("tensorboardX.proto.event_pb2")
