"""A tracker behind a bounded queue and a thread of its own: one that is down or slow never stops or slows a run.

What was sent, and what is being sent, is noted in the run directory. So a run that goes on from an earlier step sends
no step of a metric twice, and what a kill kept from the tracker is sent from metrics.jsonl. No jax here.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxtrain.metrics.recorded import Row, Text, read_items
from jaxtrain.metrics.trackers.tracker import BegunError, RefusedError, Tracker
from jaxtrain.runtime.files import write_json_atomic

# Rows that wait while a tracker takes none; at a row per second these are three hours.
_MOST_WAITING = 10_000
# Rows of this long are sent together.
_COLLECTED_SECONDS = 1.0
_MOST_TOGETHER = 200
# Seconds between tries: 1, 2, 4, and so on up to this.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
# The same once the run ends, and has few seconds.
_LONGEST_LAST_PAUSE = 4.0
_LOOK_SECONDS = 0.1
# A tracker that never answered, as where its address is wrong, is tried for this long after the end of the run.
_NEVER_ANSWERED_SECONDS = 4.0
# A wait for the end that may take so long is said once it has taken so long.
_LONG_WAIT_SECONDS, _SAID_AFTER_SECONDS = 10.0, 3.0
# An artifact store may be out of reach while numbers are taken: a text must not keep them waiting.
_TRIES_OF_A_TEXT = 3

Found = TypeVar("Found")


class _Known(NamedTuple):
    """What the record of a run holds.

    Attributes:
        id: what the tracker called the run; None: nothing yet.
        sent, sending: the last step of each metric that was sent, and of those that were being sent.
        run_dir: where the run was then.
    """

    id: str | None
    sent: dict[str, int]
    sending: dict[str, int]
    run_dir: Path


class _GivenUpError(Exception):
    """The run has ended, or the tracker refused to begin."""


class BackgroundTracker:
    """Hands rows to a tracker in a thread; nothing that the tracker does or leaves undone reaches the training.

    Args:
        name: of the tracker.
        open: begins the run there; given what the tracker called the run in an earlier process, or None.
        run_dir: directory of the run.
        record: file in it that keeps the tracker's id of the run, and the last step of each metric; a relative path.
        earlier: metrics.jsonl of a run that goes on, so that the record is of this run; rows that the tracker lacks,
            as after a kill, are sent to it. None: the run begins.
        report: called with one line for people, by whoever calls the methods.
    """

    def __init__(
        self,
        name: str,
        open: Callable[[str | None], Tracker],
        run_dir: Path,
        record: Path,
        *,
        earlier: Path | None,
        report: Callable[[str], None],
    ) -> None:
        self._name, self._open, self._report = name, open, report
        self._run_dir, self._record = run_dir, run_dir / record
        self._earlier = earlier
        # What this process appends to the file comes through the queue.
        self._earlier_bytes = earlier.stat().st_size if earlier is not None and earlier.is_file() else 0
        # The last step of each metric that was sent, and of those that are being sent.
        known = None if earlier is None else _recorded(self._record)
        self._said: deque[str] = deque()
        if known is not None and _is_copy(run_dir, record, known):
            self._said.append(
                f"{name}: {run_dir} is a copy of {known.run_dir}, whose run there stays its own: this run begins "
                "another"
            )
            known = None
        self._run_id, self._sent, self._sending, _ = known or _Known(None, {}, {}, run_dir)
        self._waiting: deque[Row | Text] = deque()
        self._lock = threading.Lock()
        self._ending, self._until, self._ended_at = threading.Event(), math.inf, math.inf
        self._end: tuple[str | None, Sequence[Path]] = (None, ())
        self._given, self._taken, self._is_complete, self._is_closed = 0, 0, False, False
        self._reason, self._is_warned, self._has_answered = "", False, False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def scalars(self, step: int, values: Mapping[str, float | int | None]) -> None:
        self._put(Row(step, time.time(), dict(values)))

    def text(self, step: int, name: str, text: str | Mapping[str, Any]) -> None:
        self._put(Text(step, name, text))

    def begin_end(self, status: str | None, files: Sequence[Path], *, until: float) -> None:
        """Have what waits sent, and the run ended on the tracker; a second call does nothing.

        Args:
            status: how the run ended; None: not known.
            files: what the tracker keeps with the run.
            until: time of `time.monotonic` up to which what fails is tried again.
        """
        if not self._ending.is_set():
            self._end, self._until, self._ended_at = (status, files), until, time.monotonic()
            self._ending.set()

    def wait_for_end(self, is_over: Callable[[], bool]) -> None:
        """Wait until that is done, and report what is not; a second call does nothing.

        Args:
            is_over: asked several times a second; once it holds, the thread is left to itself.
        """
        if self._is_closed:
            return
        self._is_closed = True
        is_said = self._until - self._ended_at < _LONG_WAIT_SECONDS
        while self._thread.is_alive() and not is_over():
            if not is_said and time.monotonic() - self._ended_at > _SAID_AFTER_SECONDS:
                is_said = True
                self._report(f"waiting for {self._name} to take what is left; Ctrl-C ends the wait")
            self._thread.join(_LOOK_SECONDS)
        self._say()
        if self._thread.is_alive():
            seconds = time.monotonic() - self._ended_at
            self._reason = f"it did not answer within {seconds:.0f} s of the end" + (
                f" ({self._reason})" if self._reason else ""
            )
        with self._lock:
            lost = self._given - self._taken
        if lost:
            self._report(
                f"{self._name} did not take {lost} of {self._given} rows: {self._reason}; metrics.jsonl has them all"
            )
        elif not self._is_complete:
            self._report(f"{self._name} has all rows, but not the end of the run: {self._reason}")

    def _put(self, item: Row | Text) -> None:
        with self._lock:
            self._given += 1
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.append(item)
        self._say()

    def _say(self) -> None:
        """Report, in the thread of the caller, what the thread of the tracker has to say."""
        while self._said:
            self._report(self._said.popleft())

    def _work(self) -> None:
        try:
            tracker = self._insist(self._begin)
            self._run_id = tracker.run_id
            self._insist(lambda: self._settle(tracker))
            self._said.append(f"{self._name}: {tracker.place}")
            self._send_earlier(tracker)
            is_last = False
            while not is_last:
                is_last = self._ending.wait(_COLLECTED_SECONDS)
                while items := self._next():
                    self._send(tracker, items)
            self._insist(lambda: tracker.end(*self._end), tries=2)
            self._is_complete = True
        except _GivenUpError:
            pass
        except BaseException as error:  # a tracker may also raise what ends a thread, such as SystemExit
            self._reason = _line(error)
            self._warn()

    def _begin(self) -> Tracker:
        try:
            return self._open(self._run_id)
        except BegunError as error:
            # Else each further try would begin one more run there.
            self._run_id = error.run_id
            self._note()
            raise error.__cause__ or error from None

    def _settle(self, tracker: Tracker) -> None:
        """Find out how much of what an earlier process was sending when it was killed has arrived."""
        for name, step in self._sending.items():
            found = step if tracker.last_step is None else tracker.last_step(name)
            if found is not None:
                self._sent[name] = max(found, self._sent.get(name, -1))
        self._sending = {}
        self._note()

    def _send_earlier(self, tracker: Tracker) -> None:
        """Send what metrics.jsonl holds from earlier processes and the tracker lacks."""
        if self._earlier is None:
            return
        rows: list[Row | Text] = []
        for item in read_items(self._earlier, self._earlier_bytes):
            if isinstance(item, Text):
                self._send_more(tracker, [item])
            else:
                rows.append(item)
            if len(rows) == _MOST_TOGETHER:
                self._send_more(tracker, rows)
                rows = []
        self._send_more(tracker, rows)

    def _send_more(self, tracker: Tracker, items: Sequence[Row | Text]) -> None:
        with self._lock:
            self._given += len(items)
        self._send(tracker, items)

    def _next(self) -> list[Row | Text]:
        """Take what waits and goes together: rows, or one text."""
        with self._lock:
            found: list[Row | Text] = []
            while self._waiting and len(found) < _MOST_TOGETHER:
                if found and (isinstance(found[0], Text) or isinstance(self._waiting[0], Text)):
                    break
                found.append(self._waiting.popleft())
            return found

    def _send(self, tracker: Tracker, items: Sequence[Row | Text]) -> None:
        rows = [row for item in items if isinstance(item, Row) and (row := self._unsent(item)).values]
        texts = [item for item in items if isinstance(item, Text) and self._is_unsent(item.name, item.step)]
        if rows or texts:
            self._note()
        try:
            if rows:
                self._insist(lambda: tracker.rows(rows))
            for text in texts:
                self._insist(lambda text=text: tracker.text(text), tries=_TRIES_OF_A_TEXT)
            with self._lock:
                self._taken += len(items)
        except RefusedError as error:
            self._reason = _line(error)
        self._sent, self._sending = {**self._sent, **self._sending}, {}
        if rows or texts:
            self._note()

    def _unsent(self, row: Row) -> Row:
        """The row without the metrics whose step was sent before."""
        known = ((name, value) for name, value in row.values.items() if value is not None and name != "step")
        values = {name: value for name, value in known if self._is_unsent(name, row.step)}
        return Row(row.step, row.seconds, values)

    def _is_unsent(self, name: str, step: int) -> bool:
        if step <= max(self._sent.get(name, -1), self._sending.get(name, -1)):
            return False
        self._sending[name] = step
        return True

    def _note(self) -> None:
        # A disk that is full is the matter of whoever writes metrics.jsonl.
        with contextlib.suppress(OSError):
            self._record.parent.mkdir(parents=True, exist_ok=True)
            noted = {"id": self._run_id, "run_dir": str(self._run_dir)}
            write_json_atomic(self._record, {**noted, "last_steps": self._sent, "sending": self._sending})

    def _warn(self) -> None:
        """Have it reported, once, that rows are not taken; at the end of the run they are counted."""
        if not self._is_warned and not self._ending.is_set():
            self._is_warned = True
            self._said.append(f"{self._name} takes no rows: {self._reason}; training goes on without it")

    def _insist(self, call: Callable[[], Found], *, tries: int | None = None) -> Found:
        """Call until it works, with longer and longer pauses; once the run ends, until its last moment.

        Raises:
            RefusedError: the tracker refuses it, or it failed as often as it may be tried.
            _GivenUpError: the run has ended.
        """
        pause, count = _FIRST_PAUSE, 0
        while True:
            until = self._until
            if not self._has_answered:
                until = min(until, self._ended_at + _NEVER_ANSWERED_SECONDS)
            is_last = time.monotonic() >= until
            try:
                found = call()
                self._has_answered = True
                return found
            except RefusedError:
                raise
            except Exception as error:
                count += 1
                self._reason = _line(error)
            if count == tries:
                raise RefusedError(self._reason)
            if is_last:
                raise _GivenUpError
            if count == 2:
                self._warn()
            if self._ending.is_set():
                pause = min(pause, _LONGEST_LAST_PAUSE)
                time.sleep(max(0.0, min(pause, until - time.monotonic())))
            else:
                self._ending.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _recorded(path: Path) -> _Known | None:
    """What the record of a run holds; None where there is none, or a damaged one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        sent, sending = ({str(k): int(step) for k, step in found[key].items()} for key in ("last_steps", "sending"))
        return _Known(str(found["id"]), sent, sending, Path(found["run_dir"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_copy(run_dir: Path, record: Path, known: _Known) -> bool:
    """Whether a run directory is a copy of another one that is still there; one that was moved is none.

    Args:
        run_dir: the directory.
        record: file in it and in the original, a relative path.
        known: what it holds in this directory.
    """
    other = _recorded(known.run_dir / record)
    try:
        return other is not None and other.id == known.id and not os.path.samefile(known.run_dir, run_dir)
    except OSError:
        return False


def _line(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return first[:200] if isinstance(error, RefusedError) else f"{name}: {first[:200]}" if first else name
