"""What a run writes of itself: rows of metrics, run.json from its start to its end, the sample, the report."""

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import Loaded
from jaxtrain.config.secrets import redacted
from jaxtrain.data.rows import mean_tokens
from jaxtrain.errors import ConfigError, StorageError
from jaxtrain.inference.published import TOKENIZER_DIGEST, keep_published, keep_tokenizer
from jaxtrain.metrics.flops import model_flops_per_row
from jaxtrain.metrics.media import sorted_values
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.runinfo import finished_info, read_run_info, run_info
from jaxtrain.metrics.throughput import Meter, TimeSpent, device_memory_bytes
from jaxtrain.metrics.trackers import Trackers, check_trackers, open_trackers
from jaxtrain.metrics.writers import MultiWriter, Scalars, flat_scalars, open_writers
from jaxtrain.models.model import LOW_RANK, parameter_shapes
from jaxtrain.optim.optimizers import trainable_predicate
from jaxtrain.run.assemble import Run
from jaxtrain.runtime.devices import peak_flops
from jaxtrain.runtime.distributed import is_main_process
from jaxtrain.runtime.files import write_json_atomic, write_text_atomic
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.train.update import STEP_METRICS


class RunRecord:
    """The files of a run that grow with it. Only the main process writes; elsewhere every method does nothing."""

    def __init__(self, run_dir: Path, spent: TimeSpent, *, report: Callable[[str], None] = print_remark) -> None:
        self._run_dir, self.spent, self._report = run_dir, spent, report
        self._info: dict[str, Any] | None = None  # None: this process writes nothing
        self._writers, self._trackers = MultiWriter(()), Trackers(run_dir)

    def open(self, loaded: Loaded, run: Run, metadata: Mapping[str, Any], *, start: int = 0) -> None:
        """Open the writers and say what run.json will hold; rows after the resumed step are dropped."""
        self._run, config = run, run.config
        if not is_main_process():
            return
        check_trackers(config.logging)
        info, before = _described(loaded, run, metadata), read_run_info(self._run_dir) if start else {}
        self.spent.after(before.get("seconds") or {})
        self._writers = open_writers(self._run_dir, config.logging, resumed_step=start, report=self._report)
        adapter = config.finetune.adapter
        info["published"] = keep_published(self._run_dir, config.model, adapter=adapter, is_resumed=start > 0)
        info["created"] = before.get("created") or info["created"]
        resumes = [step for step in before.get("resumed_after") or [] if step < start]
        info["resumed_after"] = [*resumes, start] if start else []
        self._info = info
        self._trackers = open_trackers(
            self._run_dir, config.logging, info=info, is_resumed=start > 0, report=self._report
        )

    def begin(self) -> None:
        """Write run.json with the status `running`, and the tokenizer of the run's data."""
        if self._info is None:
            return
        try:
            if self._run.data.tokenizer is not None:
                self._info[TOKENIZER_DIGEST] = keep_tokenizer(self._run_dir, self._run.data.tokenizer)
            self._write_info()
        except OSError as error:
            raise StorageError(
                f"{self._run_dir} cannot be written: {error.strerror or error}; free space, or use another --run-dir"
            ) from None

    def _write_info(self, **changes: Any) -> None:
        info = {**(self._info or {}), "seconds": self.spent.seconds(), **changes}
        self._run_dir.mkdir(mode=0o750, parents=True, exist_ok=True)  # which may have been deleted
        write_json_atomic(self._run_dir / "run.json", info)

    def update(self) -> None:
        """Write run.json again, with the time so far: a run that is killed goes on counting from it."""
        if self._info is not None:
            with contextlib.suppress(OSError):  # what is there is older, and no worse
                self._write_info()

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
        writers, self._writers = self._writers, MultiWriter(())
        info, self._info = self._info, None
        try:
            try:
                writers.close()
            finally:
                if info is not None:
                    self._write_end(info, status, final)
            if info is not None and self._run.config.logging.report:
                from jaxtrain.metrics.report.page import write_report

                with progress.phase("drawing the report") as phase:
                    try:
                        write_report(self._run_dir)
                    except (OSError, ConfigError) as error:  # no run is lost over its report
                        phase.note(f"not written: {error}")
        finally:
            self._trackers.end(status, is_asked=is_asked)

    def _write_end(self, info: Mapping[str, Any], status: str, final: Scalars) -> None:
        final = {**final, "wall_seconds": round(sum(self.spent.seconds().values()), 2)}
        try:
            self._write_info(**finished_info(info, status=status, final=final))
        except OSError as error:
            raise StorageError(
                f"the end of the run ({status}) cannot be written to {self._run_dir / 'run.json'}: "
                f"{error.strerror or error}; free space and run again: the checkpoints are complete"
            ) from None


def _described(loaded: Loaded, run: Run, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of run.json at the start of a run."""
    data = run.data
    spec = run.batches.spec()
    step = run.step
    inputs = spec.get("inputs")
    num_outputs = step.feed.num_classes(spec)
    info = run_info(
        run.config,
        name=loaded.name,
        mesh_shape=dict(step.mesh.shape),
        model={"name": step.model.name, "num_parameters": run.num_parameters, "num_outputs": num_outputs},
        data={
            "description": redacted(data.description),
            "fingerprint": data.fingerprint,
            "num_validation_rows": None if data.validation is None else len(data.validation),
            "reading": data.reading,
            # What the model is built from, so that it can be opened where the data is not.
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
        **{key: metadata.get(key) for key in ("from_python", "base")},
        "choices": list(step.choices),
        "compiler_options": dict(step.compiler_options.used),
    }


class StepLog:
    """Measures every step and logs some of them, with the means of the loss and the metrics since the row before."""

    def __init__(self, run: Run, *, meter: Meter, record: RunRecord, progress: Progress) -> None:
        self._meter = meter
        self._record = record
        self._progress = progress
        self._every = run.config.logging.every
        # A resumed run logs the rows of one that was never stopped.
        self._always = (1, run.config.train.steps)
        self._unlogged: tuple[int, Mapping[str, jax.Array]] | None = None
        self.row: Scalars = {}

    def note(self, number: int, metrics: Mapping[str, jax.Array], seconds: float, waited: float) -> None:
        """Take note of a step that is done."""
        # The step is done: nothing waits for its numbers. Arrays are those of the logged step, as they may be large.
        scalars = {name: value.item() for name, value in metrics.items() if name not in STEP_METRICS and not value.ndim}
        self._meter.record(seconds, waited, scalars)
        self._record.spent.add("steps", seconds - waited)
        self._record.spent.add("waiting for data", waited)
        if number % self._every == 0 or number in self._always:
            self._log(number, metrics)
        else:
            self._unlogged = number, metrics
            self._progress.update(number, {})

    def end(self) -> None:
        """Log the last step where it was not: a run that stops early did not know before that it was the last."""
        if self._unlogged is not None:
            # A device that failed gives nothing, a full disk takes nothing, and what ends the run says that it did.
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


def run_meter(run: Run, *, own_model: bool) -> Meter:
    """The meter of a run: what a step counts, and the FLOPs and the peak that utilization is computed from."""
    config, data = run.config, run.data
    peak = peak_flops(jax.devices()[0].device_kind, config.precision.policy)
    mean = mean_tokens(data.train) if data.unit == "tokens" else None
    return Meter(
        "tokens" if data.unit == "tokens" else "examples",
        (data.units_per_row if mean is None else mean) * config.train.global_batch_size,
        flops_per_step=None if own_model else step_flops(run),
        peak_flops=None if peak is None else peak * run.step.mesh.size,
    )


def step_flops(run: Run) -> float | None:
    """Model FLOPs of a step of the config's model; None where a size that it needs is not known."""
    config = run.config
    data = run.data
    model = run.step.model
    shapes = parameter_shapes(model)
    adapted = model.adapted
    adapters = {}
    if adapted is None:
        is_trained = trainable_predicate(config.optimizer.freeze, list(shapes))
    else:
        is_trained = adapted.trains
        kernels = parameter_shapes(adapted.original)
        # Elements of the two factors of an adapter, as a multiple of its kernel's.
        adapters = {
            path: sum(shapes[f"{path}/{name}"].size for name in LOW_RANK) / kernels[path].size
            for path in adapted.targets
        }
    flops = model_flops_per_row(
        config.model,
        sequence_length=data.input_shape[-1] if data.unit == "tokens" else None,
        input_shape=data.input_shape,
        num_outputs=data.num_outputs,
        vocab_size=data.vocab_size,
        decoder_length=data.decoder_length,
        trained=None if is_trained is None else [path for path in shapes if is_trained(path)],
        adapters=adapters,
        reference=run.step.task.reads_reference,
    )
    # A pair of answers [2, L] is two texts.
    texts = math.prod(data.input_shape[:-1]) if data.unit == "tokens" else 1
    return None if flops is None else flops * texts * config.train.global_batch_size
