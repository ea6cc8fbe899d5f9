"""What a run writes of itself: rows of metrics, run.json from its start to its end, the sample, the report."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import Loaded
from jaxtrain.data.rows import mean_tokens
from jaxtrain.errors import ConfigError, StorageError
from jaxtrain.layout.rules import entry_axes
from jaxtrain.metrics.flops import model_flops_per_row
from jaxtrain.metrics.media import sorted_values
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.runinfo import finished_info, read_run_info, run_info
from jaxtrain.metrics.throughput import Meter, device_memory_bytes
from jaxtrain.metrics.time_spent import TimeSpent, save_entry, with_save
from jaxtrain.metrics.trackers import Trackers, check_trackers, open_trackers
from jaxtrain.metrics.writers import LastingWriter, MultiWriter, Scalars, flat_scalars, open_writers
from jaxtrain.models.model import LOW_RANK, parameter_shapes
from jaxtrain.models.tasks import is_shipped
from jaxtrain.optim.optimizers import trainable_predicate
from jaxtrain.run.callbacks import EARLY_STOPPED
from jaxtrain.run.directory import KEPT, TOKENIZER_DIGEST, TOKENIZER_FILE, seconds_before
from jaxtrain.run.published import keep_published, keep_tokenizer
from jaxtrain.run.resume import RECORD
from jaxtrain.runtime.devices import peak_flops
from jaxtrain.runtime.distributed import is_main_process
from jaxtrain.runtime.files import identity, strict_json, write_json_atomic, write_text_atomic
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.runtime.tree import path_name
from jaxtrain.train.assemble import Run


class RunRecord:
    """The files of a run that grow with it. Only the main process writes; elsewhere every method does nothing.

    A run that was done before this process stays as it is on disk: neither its rows nor its run.json change.
    """

    def __init__(
        self,
        run_dir: Path,
        spent: TimeSpent,
        *,
        report: Callable[[str], None] = print_remark,
    ) -> None:
        self._run_dir, self.spent, self._report = run_dir, spent, report
        self._identity = identity(run_dir)
        self._info: dict[str, Any] | None = None
        self._writes = False  # the main process, unless the run was done before
        self._unwritten = False
        self._writers, self._trackers = MultiWriter(()), Trackers(run_dir)
        self._metrics: LastingWriter | None = None
        self._saved: dict[int, Mapping[str, float]] = {}  # step -> where the time had gone when it was saved

    def open(
        self, loaded: Loaded, run: Run, metadata: Mapping[str, Any], *, start: int = 0, has_ended: bool = False
    ) -> None:
        """Open the writers and say what run.json will hold; rows after the resumed step are dropped."""
        self._run = run
        if not is_main_process():
            return
        check_trackers(run.config.logging)
        info = _described(loaded, run, metadata)
        before = read_run_info(self._run_dir) if start else {}
        # Before the rows of lost steps are dropped, which changes when the file was last written.
        earlier = seconds_before(self._run_dir, before, start=start, began_at=self.spent.began_at)
        self._open_writers(start)
        is_base = run.config.finetune.lora is not None
        info["published"] = keep_published(self._run_dir, run.config.model, is_resumed=start > 0, is_base=is_base)
        info["created"] = before.get("created") or info["created"]
        resumes = [step for step in before.get("resumed_after") or [] if step < start]
        info["resumed_after"] = [*resumes, start] if start else []
        info["seconds"] = earlier
        info["saves"] = [save_entry(start, earlier, at=self.spent.began_at)]
        self._saved = {start: earlier}
        self.spent.after(earlier)
        self._info = info
        self._writes = not (has_ended and before.get("status") in ("done", EARLY_STOPPED))
        if self._writes:
            self._trackers = open_trackers(
                self._run_dir, run.config.logging, info=info, is_resumed=start > 0, report=self._report
            )

    def _open_writers(self, step: int) -> None:
        logging = self._run.config.logging
        self._writers = open_writers(self._run_dir, logging, resumed_step=step, report=self._report)
        metrics = self._writers.writers[0]
        assert isinstance(metrics, LastingWriter)
        self._metrics = metrics

    @property
    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of run.json."""
        info = self._info or {}
        return {key: info[key] for key in KEPT if key in info}

    def begin(self) -> None:
        """Write run.json with the status `running`, and the tokenizer of the run's data."""
        if self._info is None:
            return
        try:
            self._keep_tokenizer()
            if self._writes:
                self._write_info()
        except OSError as error:
            raise StorageError(
                f"{self._run_dir} cannot be written: {error.strerror or error}; free space, or use another --run-dir"
            ) from None

    def _keep_tokenizer(self) -> None:
        if self._info is not None and self._run.data.tokenizer is not None:
            self._info[TOKENIZER_DIGEST] = keep_tokenizer(self._run_dir, self._run.data.tokenizer)

    def _write_info(self, **changes: Any) -> None:
        info = {**(self._info or {}), "seconds": self.spent.seconds(), **changes}
        if skipped := self._run.data.skipped:  # records that the data leaves out
            named = [text for source in skipped for text in source.named]
            info["skipped_records"] = {"count": sum(source.count for source in skipped), "first": named}
        write_json_atomic(self._run_dir / "run.json", info)

    def _try_to_write(self, write: Callable[[], object], what: str) -> None:
        """Write, or say once that it fails: what is there is older, and no worse, and the next save tries again."""
        try:
            write()
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                self._report(f"{what} of {self._run_dir} cannot be written: {error.strerror}; training goes on")
            self._unwritten = True

    def keep_time(self, step: int) -> None:
        """Write into run.json where the time went until this save: a run that is killed goes on counting from it."""
        self.look()
        if self._info is not None:
            entry = save_entry(step, self.spent.seconds(), at=time.time())
            self._saved[step] = entry["seconds"]
            self._info["saves"] = with_save(self._info.get("saves"), entry)
            if self._writes:
                self._try_to_write(self._write_info, "run.json")

    def look(self) -> None:
        """Write again what is gone of the run directory, which may be deleted, moved or unmounted, and say so."""
        metrics = self._metrics
        if not self._writes or metrics is None:
            return
        is_gone = identity(self._run_dir) != self._identity
        names = ["run.json", *([TOKENIZER_FILE] if self._run.data.tokenizer is not None else [])]
        missing = [name for name in names if not (self._run_dir / name).is_file()]
        if not (is_gone or missing) and metrics.is_in_place():
            return

        def write() -> None:
            self._run_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._identity = identity(self._run_dir)
            found = [] if metrics.is_in_place() else [metrics.write_again()]
            self._keep_tokenizer()
            self._write_info()
            found += [f"{name} is written again" for name in missing]
            self._report(f"{what} while the run goes on: {', '.join(found)}")

        what = f"{self._run_dir} was deleted, moved or unmounted" if is_gone else f"files of {self._run_dir} are gone"
        self._try_to_write(write, "what is gone")

    def go_back(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Drop the rows after a step, which the run goes on from, and write the roll backs into run.json."""
        if step in self._saved:
            self.spent.lose_steps(self._saved[step])
        if self._info is not None:
            self._writers.close()
            self._open_writers(step)
            self._info[RECORD] = metadata[RECORD]
            self._try_to_write(self._write_info, "run.json")

    def scalars(self, step: int, values: Scalars) -> None:
        """Add a row of metrics."""
        if self._writes:
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
        if self._writes:
            self._writers.text(step, name, text)
            self._trackers.text(step, name, text)

    def sample(self, step: int, text: str) -> None:
        """Write a generated text to sample.txt, metrics.jsonl and the trackers."""
        if self._info is not None:
            with contextlib.suppress(OSError):
                write_text_atomic(self._run_dir / "sample.txt", text)
            self._text(step, "sample", text)

    def held_out(self, found: Mapping[str, Any] | None) -> None:
        """Write what the report shows of single held-out rows to held_out.json; None: there is nothing to show."""
        if self._info is not None and found is not None:
            # On one line: indented, a matrix would have four lines per count.
            content = json.dumps(strict_json(found), ensure_ascii=False, allow_nan=False)
            with contextlib.suppress(OSError):  # no run is lost over its report
                write_text_atomic(self._run_dir / "held_out.json", f"{content}\n")

    def close(
        self, status: str, final: Scalars, progress: Progress, *, is_asked: Callable[[], bool] = lambda: False
    ) -> None:
        """Close the writers, write the end into run.json, draw the report; a second call does nothing."""
        try:
            self.look()
            writes, self._writes = self._writes, False
            writers, self._writers = self._writers, MultiWriter(())
            try:
                writers.close()
            finally:
                if writes:
                    self._write_end(status, final)
            if writes and self._run.config.logging.report:
                from jaxtrain.metrics.report.page import write_report

                with progress.phase("drawing the report") as phase:
                    try:
                        write_report(self._run_dir)
                    except (OSError, ConfigError) as error:  # no run is lost over its report
                        phase.note(f"not written: {error}")
        finally:
            self._trackers.end(status, is_asked=is_asked)

    def _write_end(self, status: str, final: Scalars) -> None:
        seconds = self.spent.seconds()
        final = {**final, "wall_seconds": round(sum(seconds.values()), 2)}
        try:
            self._write_info(**finished_info({"seconds": seconds}, status=status, final=final))
        except OSError as error:
            raise StorageError(
                f"the end of the run ({status}) cannot be written to {self._run_dir / 'run.json'}: "
                f"{error.strerror or error}; free space and run again: the checkpoints are complete"
            ) from None


def _described(loaded: Loaded, run: Run, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of run.json at the start of a run."""
    data, spec = run.data, run.batches.spec()
    inputs = spec.get("inputs")
    info = run_info(
        run.config,
        name=loaded.name,
        mesh_shape=dict(run.step.mesh.shape),
        model={
            "name": run.step.model.name,
            "num_parameters": run.num_parameters,
            "num_outputs": run.step.feed.num_classes(spec),
        },
        data={
            "description": list(data.description),
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
        "task": run.step.task.name,
        "task_is_shipped": is_shipped(run.step.task),
        "parameters": _parameters(run),
        **{key: metadata.get(key) for key in ("from_python", "base")},
        **{key: metadata[key] for key in (RECORD,) if key in metadata},
        "choices": list(run.step.choices),
        "compiler_options": dict(run.step.compiled_with),
    }


def _parameters(run: Run) -> dict[str, str]:
    """Parameter path -> `float32[160,448] fsdp,-`: dtype, shape, mesh axes of each dimension; `frozen` at the end."""
    trainable = run.step.program.settings.trainable
    sizes, found = run.step.mesh.shape, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.step.sharded_model.abstract_params):
        name = path_name(path)
        axes = ["+".join(axis for axis in entry_axes(entry) if sizes[axis] > 1) or "-" for entry in leaf.sharding.spec]
        sharding = ",".join(axes) if any(axis != "-" for axis in axes) else ""
        parts = [f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]", sharding]
        parts.append("" if trainable is None or trainable(name) else "frozen")
        found[name] = " ".join(part for part in parts if part)
    return found


class StepLog:
    """Measures every step and logs some of them."""

    def __init__(
        self, run: Run, *, meter: Meter, record: "RunRecord", progress: Progress, start: int, row: Scalars
    ) -> None:
        self._meter, self._record, self._progress = meter, record, progress
        self._every = run.config.logging.every
        self._always = (start + 1, run.config.train.steps)
        self._skipped = run.data.skipped
        self._unlogged: tuple[int, Mapping[str, jax.Array]] | None = None
        self.row: Scalars = row

    def note(self, number: int, metrics: Mapping[str, jax.Array], seconds: float, waited: float) -> None:
        """Take note of a step that is done."""
        self._meter.record(number, seconds, waited)
        self._record.spent.add("steps", seconds - waited)
        self._record.spent.add("waiting for data", waited)
        if number % self._every == 0 or number in self._always:
            self._log(number, metrics)
        else:
            self._unlogged = number, metrics
            self._progress.update(number, {})

    def end(self) -> None:
        """Log the last step where it was not: a run that stops early did not know before that it was the last."""
        unlogged, self._unlogged = self._unlogged, None
        if unlogged is not None:
            # A device that failed gives nothing, a full disk takes nothing, and what ends the run says that it did.
            with contextlib.suppress(jax.errors.JaxRuntimeError, StorageError):
                self._log(*unlogged)

    def go_back(self) -> None:
        """Forget the last step, which the run went back before."""
        self._unlogged = None

    def _log(self, number: int, metrics: Mapping[str, jax.Array]) -> None:
        self._unlogged = None
        values = flat_scalars(jax.device_get(dict(metrics)))
        standard = {name: values.pop(name) for name in ("loss", "grad_norm", "skipped_steps")}
        standard["learning_rate"] = values.pop("learning_rate", None)  # not known of an optimizer from Python
        for name in ("weight", "skipped_in_a_row", "spiked"):
            values.pop(name, None)
        if self._skipped:
            values["skipped_records"] = sum(source.count for source in self._skipped)
        self.row = self._meter.row(number, **standard, device_memory_bytes=device_memory_bytes(), more=values)
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
    config, data, model = run.config, run.data, run.step.model
    shapes, adapted, adapters = parameter_shapes(model), model.adapted, {}
    if adapted is None:
        is_trained = trainable_predicate(config.optimizer.freeze, list(shapes))
    else:
        is_trained, kernels = adapted.trains, parameter_shapes(adapted.original)
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
    )
    # A pair of answers [2, L] is two texts.
    texts = math.prod(data.input_shape[:-1]) if data.unit == "tokens" else 1
    return None if flops is None else flops * texts * config.train.global_batch_size
