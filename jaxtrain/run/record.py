"""What a run writes of itself: rows of metrics, run.json from its start to its end, the sample, the report."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config.secrets import redacted
from jaxtrain.errors import ConfigError, StorageError
from jaxtrain.inference.published import keep_published, keep_tokenizer
from jaxtrain.metrics.media import sorted_values
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.report.page import write_report
from jaxtrain.metrics.runinfo import finished_info, read_run_info, run_info
from jaxtrain.metrics.throughput import Meter, TimeSpent, device_memory_bytes
from jaxtrain.metrics.trackers import Trackers, check_trackers, open_trackers
from jaxtrain.metrics.writers import MultiWriter, Scalars, flat_scalars, open_writers
from jaxtrain.run.assemble import Run
from jaxtrain.runtime.distributed import is_main_process
from jaxtrain.runtime.files import write_json_atomic, write_text_atomic
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.train.update import STEP_METRICS


class RunRecord:
    """The files of a run that grow with it. Only the main process writes; elsewhere every method does nothing."""

    def __init__(self, run_dir: Path, spent: TimeSpent, *, report: Callable[[str], None] = print_remark) -> None:
        self._run_dir = run_dir
        self._spent = spent
        self._report = report
        self._info: dict[str, Any] | None = None  # content of run.json; None: this process writes nothing
        self._writers = MultiWriter(())
        self._trackers = Trackers(run_dir)

    def open(self, run: Run, metadata: Mapping[str, Any], *, start: int = 0) -> None:
        """Open the writers and decide what run.json will hold; rows after the resumed step are dropped."""
        self._run = run
        config = run.config
        if not is_main_process():
            return
        check_trackers(config.logging)
        info = _start_info(run, metadata)
        info["published"] = keep_published(
            self._run_dir, config.model, adapter=config.finetune.adapter, is_resumed=start > 0
        )
        info["resumed_after"] = []
        if start:
            before = read_run_info(self._run_dir)
            self._spent.after(before.get("seconds") or {})
            info["created"] = before.get("created") or info["created"]
            resumes = before.get("resumed_after") or []
            info["resumed_after"] = [*(step for step in resumes if step < start), start]
        self._info = info
        self._writers = open_writers(self._run_dir, config.logging, resumed_step=start, report=self._report)
        self._trackers = open_trackers(
            self._run_dir, config.logging, info=info, is_resumed=start > 0, report=self._report
        )

    def begin(self) -> None:
        """Write run.json with the status `running`, and the tokenizer of the run's data.

        Raises:
            StorageError: the directory cannot be written.
        """
        if self._info is None:
            return
        tokenizer = self._run.data.tokenizer
        try:
            if tokenizer is not None:
                keep_tokenizer(self._run_dir, tokenizer)
            self._write_info(self._info)
        except OSError as error:
            raise StorageError(
                f"{self._run_dir} cannot be written: {error.strerror or error}; free space, or use another --run-dir"
            ) from None

    def _write_info(self, info: Mapping[str, Any]) -> None:
        self._run_dir.mkdir(mode=0o750, parents=True, exist_ok=True)  # which may have been deleted
        write_json_atomic(self._run_dir / "run.json", {**info, "seconds": self._spent.seconds()})

    def update(self) -> None:
        """Write run.json again, with the time so far: a run that is killed continues to count from it."""
        if self._info is not None:
            with contextlib.suppress(OSError):  # what is there is older, and no worse
                self._write_info(self._info)

    def scalars(self, step: int, values: Scalars) -> None:
        """Add a row of metrics."""
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
        self._writers.text(step, name, text)
        self._trackers.text(step, name, text)

    def sample(self, step: int, text: str) -> None:
        """Write a generated text to sample.txt, metrics.jsonl and the trackers."""
        if self._info is not None:
            with contextlib.suppress(OSError):
                write_text_atomic(self._run_dir / "sample.txt", text)
            self._text(step, "sample", text)

    def close(
        self, status: str, final: Scalars, progress: Progress, *, is_asked: Callable[[], bool] = lambda: False
    ) -> None:
        """Close the writers, write the end into run.json, draw the report; a second call does nothing."""
        writers = self._writers
        info = self._info
        self._writers = MultiWriter(())
        self._info = None
        try:
            try:
                writers.close()
            finally:
                if info is not None:
                    self._write_end(info, status, final)
            if info is not None and self._run.config.logging.report:
                self._draw_report(progress)
        finally:
            self._trackers.end(status, is_asked=is_asked)

    def _write_end(self, info: Mapping[str, Any], status: str, final: Scalars) -> None:
        final = {**final, "wall_seconds": round(sum(self._spent.seconds().values()), 2)}
        try:
            self._write_info({**info, **finished_info(info, status=status, final=final)})
        except OSError as error:
            raise StorageError(
                f"the end of the run ({status}) cannot be written to {self._run_dir / 'run.json'}: "
                f"{error.strerror or error}; free space and run again: the checkpoints are complete"
            ) from None

    def _draw_report(self, progress: Progress) -> None:
        with progress.phase("drawing the report") as phase:
            try:
                write_report(self._run_dir)
            except (OSError, ConfigError) as error:  # no run is lost over its report
                phase.note(f"not written: {error}")


def _start_info(run: Run, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of run.json at the start of a run."""
    data = run.data
    step = run.step
    spec = run.batches.spec()
    inputs = spec.get("inputs")
    info = run_info(
        run.config,
        name=run.spec.loaded.name,
        mesh_shape=dict(step.mesh.shape),
        model={
            "name": step.model.name,
            "num_parameters": run.num_parameters,
            "num_outputs": step.feed.num_classes(spec),
        },
        data={
            "description": redacted(data.description),
            "fingerprint": data.fingerprint,
            "num_validation_rows": None if data.validation is None else len(data.validation),
            "reading": data.reading,
            # What the model is built from, so that it can be opened without the data.
            "input_shape": list(data.input_shape),
            "input_dtype": str(inputs.dtype) if isinstance(inputs, jax.ShapeDtypeStruct) else None,
            "vocab_size": data.vocab_size,
            "end_of_text": None if data.tokenizer is None else data.tokenizer.end_of_text,
            "num_outputs": data.num_outputs,
        },
    )
    return {
        **info,
        "task": step.task.name,
        "from_python": metadata["from_python"],
        "base": metadata["base"],
        "choices": list(step.choices),
        "compiler_options": dict(step.compiler_options.used),
    }


class StepLog:
    """Measures every step and logs some of them, with the means of the loss and the metrics since the row before.

    Attributes:
        row: the last row that was logged.
    """

    def __init__(self, run: Run, *, meter: Meter, record: RunRecord, spent: TimeSpent, progress: Progress) -> None:
        self._meter = meter
        self._record = record
        self._spent = spent
        self._progress = progress
        self._every = run.config.logging.every
        # A resumed run logs the rows of one that was never stopped.
        self._always = (1, run.config.train.steps)
        self._unlogged: tuple[int, Mapping[str, jax.Array]] | None = None
        self.row: Scalars = {}

    def note(self, number: int, metrics: Mapping[str, jax.Array], seconds: float, waited: float) -> None:
        """Measure a step that is done, and log it if it is its turn."""
        # The step is done: nothing waits for its numbers. Arrays are those of the logged step, as they may be large.
        scalars = {name: value.item() for name, value in metrics.items() if name not in STEP_METRICS and not value.ndim}
        self._meter.record(seconds, waited, scalars)
        self._spent.add("steps", seconds - waited)
        self._spent.add("waiting for data", waited)
        if number % self._every == 0 or number in self._always:
            self._log(number, metrics)
        else:
            self._unlogged = (number, metrics)
            self._progress.update(number, {})

    def end(self) -> None:
        """Log the last step if it was not: a run that stops early did not know before that it was the last."""
        if self._unlogged is not None:
            # A device that failed gives nothing, a full disk takes nothing, and what ends the run reports it.
            with contextlib.suppress(jax.errors.JaxRuntimeError, StorageError):
                self._log(*self._unlogged)

    def _log(self, number: int, metrics: Mapping[str, jax.Array]) -> None:
        self._unlogged = None
        values = flat_scalars(jax.device_get(dict(metrics)))
        for name in ("loss", "weight", "skipped_in_a_row", "spiked"):
            values.pop(name, None)
        self.row = self._meter.row(
            number,
            grad_norm=values.pop("grad_norm"),
            learning_rate=values.pop("learning_rate", None),  # not known of an optimizer from Python
            skipped_steps=values.pop("skipped_steps"),
            device_memory_bytes=device_memory_bytes(),
            more=values,
        )
        self._record.scalars(number, self.row)
        self._progress.update(number, self.row)
