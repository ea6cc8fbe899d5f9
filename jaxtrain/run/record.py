"""What a run writes of itself: rows of metrics, run.json from its start to its end, the sample, the report."""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import Loaded
from jaxtrain.data import Tokenizer
from jaxtrain.data.skipped import SkippedRecords
from jaxtrain.errors import ConfigError, StorageError
from jaxtrain.metrics.media import sorted_values
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.runinfo import EVALUATED_ROWS, finished_info, read_run_info
from jaxtrain.metrics.time_spent import TimeSpent, save_entry, with_save
from jaxtrain.metrics.trackers import Trackers, check_trackers, open_trackers
from jaxtrain.metrics.writers import LastingWriter, MultiWriter, Scalars, open_writers
from jaxtrain.run.described import described
from jaxtrain.run.in_place import InPlace
from jaxtrain.run.kept_tokenizer import DIGEST_KEY, TOKENIZER_FILE, keep_tokenizer
from jaxtrain.run.lock import RunLock
from jaxtrain.run.mended import kept_info
from jaxtrain.run.published import keep_published
from jaxtrain.run.restarted import seconds_before
from jaxtrain.run.roll_back import RECORD
from jaxtrain.run.shown_chats import shown_chats
from jaxtrain.run.watch import EARLY_STOPPED
from jaxtrain.runtime.files import put_aside, strict_json, write_json_atomic, write_text_atomic
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.train.assemble import Run


class RunRecord:
    """The files of a run that grow with it. Only the main process writes; elsewhere every method does nothing.

    A run that was done before this process stays as it is on disk: neither its rows nor its run.json change. The
    exception is a run that is made longer and whose early stopping refuses the further steps: its status and its number
    of steps are written.

    Args:
        run_dir: directory of the run.
        writers: where rows of metrics go; none on processes other than the main one.
        info: content of run.json at the start; None on processes other than the main one.
        was_done: the content of run.json where the run had ended before this process; None: it had not.
        spent: where the time of the run goes.
        draws_report: whether report.html is drawn at the end.
        place: notices that files are gone; None: nobody does.
        report: called with one line for people.
        reopened: step -> writers, and that of the rows, where a run goes on from an earlier step; drops later rows.
        trackers: dashboards that show the run; None: none do.

    Attributes:
        spent: as given; who spends time on the run adds it there.
        draws_report: as given.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        writers: MultiWriter,
        info: Mapping[str, Any] | None,
        was_done: Mapping[str, Any] | None,
        spent: TimeSpent,
        draws_report: bool,
        place: InPlace | None = None,
        report: Callable[[str], None] = print_remark,
        reopened: Callable[[int], tuple[MultiWriter, LastingWriter]] | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        self._run_dir, self._trackers = run_dir, trackers or Trackers(run_dir)
        self._writers, self._reopened = writers, reopened
        self._info = info if was_done is None else None
        self._is_main = info is not None
        self._num_steps: int | None = None if info is None else info["config"]["train"]["steps"]
        self._was_done = was_done
        self._place, self._report = place, report
        self._tokenizer: Tokenizer | None = None
        self._unwritten: str | None = None
        self._skipped: tuple[SkippedRecords, ...] = ()
        self._has_begun = False
        # Step -> where the time had gone when it was saved.
        self._saved = {save["step"]: save["seconds"] for save in (info or {}).get("saves", ())}
        self.spent = spent
        self.draws_report = draws_report

    def begin(self, run: Run) -> None:
        """Write run.json with the status `running`, and the tokenizer of the run's data.

        Raises:
            StorageError: they cannot be written.
        """
        self._skipped = run.data.skipped
        if not self._is_main:
            return
        try:
            if run.data.tokenizer is not None:
                self._keep_tokenizer(run.data.tokenizer)
            if self._info is not None:
                self._write_info()
        except OSError as error:
            raise StorageError(
                f"{self._run_dir} cannot be written: {error.strerror or error}; free space, or use another --run-dir"
            ) from None
        self._has_begun = True
        if self.draws_report:
            self._write("rows.json", shown_chats(run.data))

    def keep_time(self, step: int) -> None:
        """Write into run.json where the time went until this save: a run that is killed goes on counting from it."""
        self.look()
        if self._info is not None:
            entry = save_entry(step, self.spent.seconds(), at=time.time())
            self._saved[step] = entry["seconds"]
            self._info = {**self._info, "saves": with_save(self._info.get("saves"), entry)}
            self._try_to_write_info()

    def _try_to_write_info(self) -> None:
        before, self._unwritten = self._unwritten, None
        try:
            self._write_info()
        except OSError as error:
            # What it holds is older, and no worse: the next save tries again.
            self._unwritten = error.strerror or str(error)
            if before is None:
                self._report(f"run.json of {self._run_dir} cannot be written: {self._unwritten}; training goes on")

    def look(self) -> None:
        """Write again what is gone of the run directory, and say so.

        Raises:
            StorageError: another run has the directory, see `is_lost`; said once.
        """
        if self._place is None or not self._has_begun:
            return
        files: dict[str, Callable[[], None]] = {}
        if self._info is not None:
            files["run.json"] = self._write_info
        if self._tokenizer is not None:
            files[TOKENIZER_FILE] = functools.partial(self._keep_tokenizer, self._tokenizer)
        self._place.look(files)

    @property
    def is_lost(self) -> bool:
        """Whether another run has the directory, in which this one must write nothing more."""
        return self._place is not None and self._place.is_lost

    def _keep_tokenizer(self, tokenizer: Tokenizer) -> None:
        digest, line = keep_tokenizer(self._run_dir, tokenizer)
        self._tokenizer = tokenizer
        if self._info is not None:
            self._info = {**self._info, DIGEST_KEY: digest}
        if line is not None:
            self._report(line)

    @property
    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of run.json."""
        return {} if self._info is None else kept_info(self._info)

    def _write_info(self) -> None:
        path = self._run_dir / "run.json"
        put_aside(path)
        write_json_atomic(path, {**(self._info or {}), **self._bad_records(), "seconds": self.spent.seconds()})

    def _bad_records(self) -> dict[str, Any]:
        """What run.json says of the records that the data left out; nothing where none may be."""
        if not self._skipped:
            return {}
        named = [text for source in self._skipped for text in source.named]
        return {"skipped_records": {"count": sum(source.count for source in self._skipped), "first": named}}

    def go_back(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Drop the rows after a step, which the run goes on from, and write the roll backs into run.json.

        What was spent on the steps since that one was saved is lost.

        Args:
            step: the step.
            metadata: of the run's next checkpoint.
        """
        if self._reopened is not None:
            self._writers.close()
            self._writers, metrics = self._reopened(step)
            if self._place is not None:
                self._place.follow(metrics)
        if step in self._saved:
            self.spent.lose_steps(self._saved[step])
        if self._info is not None:
            noted = {key: metadata[key] for key in (RECORD, EVALUATED_ROWS) if key in metadata}
            self._info = {**self._info, **noted}
            self._try_to_write_info()

    def held_out(self, found: Mapping[str, Any] | None) -> None:
        """Write what the report shows of single held-out rows to held_out.json; None: there is nothing to show."""
        if self._is_main:
            self._write("held_out.json", found)

    def _write(self, name: str, found: Mapping[str, Any] | None) -> None:
        """Write what only the report reads; None: nothing."""
        if found is not None:
            # On one line: indented, a matrix would have four lines per count.
            content = json.dumps(strict_json(found), ensure_ascii=False, allow_nan=False)
            # No run is lost over its report; a disk that is full shows where run.json is written.
            with contextlib.suppress(OSError):
                write_text_atomic(self._run_dir / name, f"{content}\n")

    def scalars(self, step: int, values: Scalars) -> None:
        """Add a row of metrics."""
        if self._was_done is None:
            self.look()
            self._writers.scalars(step, values)
            self._trackers.scalars(step, values)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Add what a callback logs; see `Moment.log`."""
        numbers, media = sorted_values(values)
        if numbers:
            self.scalars(step, numbers)
        for name, value in media.items():
            self._text(step, name, value)

    def _text(self, step: int, name: str, text: str | Mapping[str, Any]) -> None:
        if self._was_done is None:
            self._writers.text(step, name, text)
            self._trackers.text(step, name, text)

    def sample(self, step: int, text: str) -> None:
        """Write a generated text to sample.txt, metrics.jsonl and the trackers."""
        if self._is_main:
            with contextlib.suppress(OSError):  # as with the report
                write_text_atomic(self._run_dir / "sample.txt", text)
            self._text(step, "sample", text)

    def close(
        self, status: str, final: Scalars, progress: Progress, *, is_asked: Callable[[], bool] = lambda: False
    ) -> None:
        """Close the writers, write the end into run.json, draw the report; a second call does nothing.

        Args:
            status: how the run ended: done, early stopped, stopped by a callback, preempted, diverged, stopped or
                failed.
            final: the last metrics.
            progress: shows that the report is drawn.
            is_asked: whether somebody asks the process to stop, who waits for no tracker.
        """
        try:
            self._close_files(status, final, progress)
        finally:
            self._trackers.end(status, is_asked=is_asked)

    def _close_files(self, status: str, final: Scalars, progress: Progress) -> None:
        with contextlib.suppress(StorageError):  # what ends there, ends; `is_lost` says what must not be written
            self.look()
        writers, self._writers = self._writers, MultiWriter(())
        if self.is_lost:
            self._info = None
        ended = self._ended_otherwise(status)
        if self._info is None and ended is None:
            writers.close()
            return
        try:
            writers.close()
        finally:
            info, self._info = self._info, None
            if info is not None:
                self._end(info, status, final)
            elif ended is not None:
                self._write_end(ended, status)
        if self.draws_report and (self._run_dir / "metrics.jsonl").exists():
            from jaxtrain.metrics.report.page import write_report

            with progress.phase("drawing the report") as phase:
                try:
                    write_report(self._run_dir)
                except (OSError, ConfigError) as error:  # no run is lost over its report
                    phase.note(f"not written: {(isinstance(error, OSError) and error.strerror) or error}")

    def _ended_otherwise(self, status: str) -> dict[str, Any] | None:
        """What run.json of a run that was done is to say once early stopping refused more steps; None: what it says."""
        before = self._was_done
        if before is None or status != EARLY_STOPPED or self.is_lost:
            return None
        config = dict(before.get("config") or {})
        config["train"] = {**(config.get("train") or {}), "steps": self._num_steps}
        found = {**before, "status": status, "config": config}
        return None if found == before else found

    def _end(self, info: Mapping[str, Any], status: str, final: Scalars) -> None:
        """Write the end into run.json, and let go of the directory.

        Raises:
            StorageError: run.json cannot be written.
        """
        seconds = self.spent.seconds()
        final = {**final, "wall_seconds": round(sum(seconds.values()), 2)}
        found = {**info, **self._bad_records(), "seconds": seconds}
        self._write_end(finished_info(found, status=status, final=final), status)

    def _write_end(self, info: Mapping[str, Any], status: str) -> None:
        path = self._run_dir / "run.json"
        try:
            put_aside(path)
            write_json_atomic(path, info)
        except OSError as error:
            raise StorageError(
                f"the end of the run ({status}) cannot be written to {path}: {error.strerror or error}; free space and "
                "run again: the checkpoints are complete"
            ) from None
        finally:
            if self._place is not None:
                self._place.close()


def open_record(
    loaded: Loaded,
    run: Run,
    run_dir: Path,
    *,
    start: int,
    has_ended: bool,
    metadata: Mapping[str, Any],
    spent: TimeSpent,
    main: bool,
    lock: RunLock | None = None,
    report: Callable[[str], None] = print_remark,
) -> RunRecord:
    """Open the writers of a run and say what its run.json will hold; rows after the resumed step are dropped.

    Args:
        loaded: the config.
        run: assembled from it.
        run_dir: directory of the run.
        start: steps done before this process; 0 for a fresh run.
        has_ended: whether no step is left to this process.
        metadata: what a checkpoint of the run says of it: the parts that came from Python, and what they compute.
        spent: where the time of this process went so far.
        main: whether this process writes.
        lock: by which it holds the directory; None: nobody looks after that.
        report: called with one line for people.

    Raises:
        ConfigError: a tracker is asked for and its package is missing.
    """
    config, draws = run.config, run.config.logging.report
    if not main:
        nothing = MultiWriter(())
        return RunRecord(run_dir, writers=nothing, info=None, was_done=None, spent=spent, draws_report=draws)
    check_trackers(config.logging)
    info = described(loaded, run, metadata)
    before = read_run_info(run_dir) if start else {}
    # Before the rows of lost steps are dropped, which changes when the file was last written.
    earlier = seconds_before(run_dir, before, start=start, began_at=spent.began_at)
    # Last, because whatever fails after it would leave them open.
    reopened = functools.partial(_opened, run_dir, loaded, report)
    writers, metrics = reopened(start)
    adapters = config.finetune.lora is not None
    info["published"] = keep_published(run_dir, config.model, is_resumed=start > 0, is_base=adapters)
    info["created"] = before.get("created") or info["created"]
    info["resumed_after"] = _resumes(before, start)
    info["seconds"] = earlier
    info["saves"] = [save_entry(start, earlier, at=spent.began_at)]
    spent.after(earlier)
    was_done = before if has_ended and before.get("status") in ("done", EARLY_STOPPED) else None
    trackers = None
    if was_done is None:
        trackers = open_trackers(run_dir, config.logging, info=info, is_resumed=start > 0, report=report)
    return RunRecord(
        run_dir,
        writers=writers,
        place=InPlace(run_dir, lock=lock, metrics=metrics, report=report),
        report=report,
        info=info,
        was_done=was_done,
        spent=spent,
        draws_report=draws,
        reopened=reopened,
        trackers=trackers,
    )


def _opened(
    run_dir: Path, loaded: Loaded, report: Callable[[str], None], step: int
) -> tuple[MultiWriter, LastingWriter]:
    """The writers of a run that goes on from a step, and the one of its rows."""
    writers = open_writers(run_dir, loaded.config.logging, resumed_step=step, report=report)
    metrics = writers.writers[0]
    assert isinstance(metrics, LastingWriter)
    return writers, metrics


def _resumes(before: Mapping[str, Any], start: int) -> list[int]:
    """The steps after which the run was resumed, without those that going back to an earlier step undid."""
    found = before.get("resumed_after")
    earlier = [step for step in found if isinstance(step, int) and step < start] if isinstance(found, list) else []
    return [*earlier, start] if start else []
