"""One run in its directory: what is prepared, what is written when, and how it ends."""

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.arrays import from_process_0
from jaxtrain.config import Loaded
from jaxtrain.config.kinds import check_kinds
from jaxtrain.errors import CheckpointError, PreemptedError
from jaxtrain.layout.degrees import config_degrees
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.runinfo import finished_info, run_info, write_json_atomic
from jaxtrain.metrics.throughput import Meter, device_memory_bytes
from jaxtrain.metrics.writers import MultiWriter, flat_scalars, open_writers
from jaxtrain.run.banner import banner_lines
from jaxtrain.run.evaluation import Evaluator
from jaxtrain.run.flops import step_flops
from jaxtrain.run.interrupt import Interrupt
from jaxtrain.run.loop import Hooks, train_loop
from jaxtrain.run.own_parts import own_parts
from jaxtrain.run.result import Result
from jaxtrain.run.resume import changes_since, choose_start, finished_row, set_aside, state_changes
from jaxtrain.runtime import collector, distributed
from jaxtrain.runtime.choices import record_choices
from jaxtrain.runtime.peaks import peak_flops
from jaxtrain.train.assemble import Run, assemble, length_notes, open_run_data, reading_threads
from jaxtrain.train.state import TrainState


class Session:
    """The parts of a run that live as long as it does: writers, checkpointer, meter, profiler.

    Args:
        loaded: the config.
        run_dir: exists and is locked.
        progress: what people see.
        interrupt: entered.
        main: whether this process writes.
    """

    def __init__(self, loaded: Loaded, run_dir: Path, progress: Progress, interrupt: Interrupt, *, main: bool):
        self.loaded, self.config, self.run_dir = loaded, loaded.config, run_dir
        self._progress, self._interrupt, self._main = progress, interrupt, main
        self._writers: MultiWriter | None = None
        self._checkpointer: Checkpointer | None = None
        self._info: dict[str, Any] | None = None
        self._row: dict[str, Any] = {}
        self._evaluation: dict[str, Any] = {}
        self._evaluated_at: int | None = None
        self._profiling = False
        self._began = time.monotonic()
        self._earlier_seconds = 0.0
        self._was_done = False

    def prepare(self, *, resume: str | None, model: Any, task: Any, data: Any) -> None:
        """Read data, build and compile the step, and create or restore the state."""
        config, progress = self.config, self._progress
        self._own_model = model is not None
        self._own_parts = own_parts(model=model, task=task, data=data)
        # Degrees and kinds that do not fit fail before any data is read.
        make_mesh(**config_degrees(config.parallel), devices=None)
        if model is None and data is None:
            check_kinds(config, own_task=task is not None)
        with progress.phase("reading data") as phase:
            opened = data if data is not None else open_run_data(config)
            phase.note(opened.description[0] if opened.description else "")
        run = self._run = assemble(config, opened, name=self.loaded.name, model=model, task=task)
        keep = config.checkpoint
        self._checkpointer = Checkpointer(
            self.run_dir / "checkpoints",
            keep_last=keep.keep_last,
            keep_every=keep.keep_every,
            keep_best=keep.keep_best,
            report=progress.message,
        )
        start = choose_start(self._checkpointer, self.run_dir, resume)
        notes = list(self.loaded.notes)
        if model is not None and data is None:
            notes += length_notes(config)
        if start is not None:
            notes += self._check_resumed(start, may_change=resume is not None)
        progress.banner(banner_lines(self.loaded, run, self.run_dir, notes, own_model=self._own_model))
        with ThreadPoolExecutor(1) as pool:
            # Compiling the initialisation takes about as long as compiling the step, so the two run side by side.
            created = pool.submit(run.step.init, config.seed) if start is None else None
            self._compile(run)
            if created is not None:
                with progress.phase("creating state"):
                    self._state = jax.block_until_ready(created.result())
                self._start = 0
            else:
                with progress.phase("restoring checkpoint"):
                    self._state = self._checkpointer.restore(run.step.abstract_state)
                self._start = int(self._state.step)
        if start is None and self._main:
            # Only once the step runs: a mistake that shows in compiling leaves an earlier run as it was.
            previous = set_aside(self.run_dir)
            if previous is not None:
                progress.message(f"what an earlier run left here was moved to {previous}")
        self._evaluator = Evaluator(run.step)
        self._open_files(run)

    def _check_resumed(self, start: int, *, may_change: bool) -> list[str]:
        assert self._checkpointer is not None
        saved = self._checkpointer.metadata()
        changes = changes_since(saved, self._record(), run_dir=self.run_dir, may_change=may_change)
        try:
            self._checkpointer.check_like(self._run.step.abstract_state)  # before minutes of compiling
        except CheckpointError as error:
            found = state_changes(changes)
            back = f"; changed since: {', '.join(found[:3])}; set that back," if found else ";"
            raise CheckpointError(f"{error}{back} use another --run-dir, or start again with --resume never") from None
        same = f"same config except {', '.join(changes[:5])}" if changes else "same config"
        return [f"resuming step {start} from {self.run_dir / 'checkpoints'}: {same}"]

    def _compile(self, run: Run) -> None:
        with self._progress.phase("tracing") as phase, record_choices() as choices:
            lowered = run.step.lower(run.batches.spec())
            phase.note("; ".join(choices))
        seen: set[str] = set()

        def listen(event: str, **_: Any) -> None:
            seen.add(event.removeprefix("/jax/compilation_cache/"))

        jax.monitoring.register_event_listener(listen)
        try:
            with self._progress.phase("compiling") as phase:
                run.step.use(lowered.compile(), choices=choices)
                kept = distributed.cache_folder(self.config.compilation_cache) is not None
                # The initialisation compiles at the same time, so a miss may be its; then the note is too modest.
                found = "cache_hits" in seen and "cache_misses" not in seen
                phase.note("from cache" if found else "cached next time" if kept else "")
        finally:
            jax.monitoring.unregister_event_listener(listen)

    def _open_files(self, run: Run) -> None:
        config = self.config
        data, batch = run.data, config.train.global_batch_size
        device = jax.devices()[0]
        peak = peak_flops(device.device_kind, config.precision.policy)
        self._meter = Meter(
            "tokens" if data.unit == "tokens" else "examples",
            data.units_per_row * batch,
            # The count is that of the config's model; a user's own has none.
            flops_per_step=None if self._own_model else step_flops(run),
            peak_flops=None if peak is None else peak * run.step.mesh.size,
        )
        if self._start >= config.train.steps:
            self._row = finished_row(self.run_dir)  # no step will give one; read before run.json is begun again
        if not self._main:
            return
        self._writers = open_writers(self.run_dir, config.logging, run_name=self.loaded.name, resumed_step=self._start)
        self._info = run_info(
            config,
            name=self.loaded.name,
            mesh_shape=dict(run.step.mesh.shape),
            model={"name": run.step.model.name, "num_parameters": run.num_parameters},
            data={"description": list(data.description), "fingerprint": data.fingerprint, "reading": data.reading},
        )
        self._info["from_python"] = self._own_parts
        self._info["choices"] = list(run.step.choices)
        self._info["compiler_options"] = dict(run.step.compiler_options.used)
        if self._start:
            self._continue_info(self._info)
        if not self._was_done:
            write_json_atomic(self.run_dir / "run.json", self._info)
        if data.tokenizer is not None:
            data.tokenizer.save(self.run_dir / "tokenizer.json")

    def _continue_info(self, info: dict[str, Any]) -> None:
        """Take over from the run.json of the sessions before: when the run began, how long they took."""
        path = self.run_dir / "run.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        info["created"] = before.get("created") or info["created"]
        self._earlier_seconds = (before.get("final") or {}).get("wall_seconds") or 0.0
        self._was_done = self._start >= self.config.train.steps and before.get("status") == "done"

    def run(self) -> "Result":
        """Train to the last step, then evaluate, save, sample and report."""
        from jaxtrain.data import prefetch
        from jaxtrain.data.prefetch import queue_depth

        config, run, steps = self.config, self._run, self.config.train.steps
        self._make_up_evaluation()
        depth = queue_depth(run.batches.spec()) if config.train.prefetch == "auto" else config.train.prefetch
        batches = prefetch(run.step.loader(run.batches), self._start, steps, depth=depth)
        hooks = Hooks(self._before_step, self._finished, self._wants_pause, self._pause, self._interrupt.requested)
        done = self._start
        if self._start < steps:
            self._progress.start(steps, self._start)
            try:
                self._state, done = train_loop(
                    run.step,
                    self._state,
                    batches,
                    first=self._start + 1,
                    last=steps,
                    max_skipped_in_a_row=config.train.max_skipped_in_a_row,
                    hooks=hooks,
                )
            finally:
                batches.close()
                self._stop_profile()
        if done < steps:
            self._save(done, self._state)
            assert self._checkpointer is not None
            self._checkpointer.wait()
            raise PreemptedError(
                f"stopped after step {done} of {steps}; saved in {self.run_dir / 'checkpoints'}: run again to go on"
            )
        self._finish(done)
        return Result(self.run_dir, self._state, {**self._row, **self._evaluation}, done)

    def _make_up_evaluation(self) -> None:
        """Evaluate the state that the run goes on from, where that was due and the run stopped before it."""
        checkpointer, start = self._checkpointer, self._start
        assert checkpointer is not None
        if not 0 < start < self.config.train.steps or not self._is_due(start, self.config.evaluation.every):
            return
        # Not when the run stops: a signal leaves little time, and the save comes first.
        if from_process_0(lambda: checkpointer.info(start).eval_loss is None):
            self._evaluate(start, self._state)
            loss = self._evaluation.get("eval_loss")
            if loss is not None:
                checkpointer.add_eval_loss(start, loss)

    def _finish(self, done: int) -> None:
        self._evaluate(done, self._state)
        self._save(done, self._state)
        sample = self._sample()
        if self._start >= self.config.train.steps:
            self._progress.message(
                f"already trained to step {self._start}: raise train.steps to go on, or start again with --resume never"
            )
        self.close("done")
        reached = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in self._evaluation.items()]
        summary = [", ".join([f"done: step {done}", *reached])]
        if self.config.logging.report:
            summary.append(f"report: {self.run_dir / 'report.html'}")
        self._progress.finish([*([f"sample: {sample}"] if sample else []), *summary])

    def close(self, status: str) -> None:
        """Write the end into run.json, finish saves, close writers, draw the report. Safe to call early."""
        if self._checkpointer is not None:
            checkpointer, self._checkpointer = self._checkpointer, None
            checkpointer.close()
        if self._writers is not None:
            writers, self._writers = self._writers, None
            writers.close()
        if self._info is not None and not self._was_done:
            seconds = self._earlier_seconds + time.monotonic() - self._began
            final = {**self._row, **self._evaluation, "wall_seconds": round(seconds, 2)}
            write_json_atomic(self.run_dir / "run.json", finished_info(self._info, status=status, final=final))
            self._info = None
            if self.config.logging.report and (self.run_dir / "metrics.jsonl").exists():
                from jaxtrain.metrics.report.page import write_report

                with self._progress.phase("drawing the report"):
                    write_report(self.run_dir)

    def _before_step(self, number: int) -> None:
        if number - 1 == self.config.profile.start_step:
            jax.profiler.start_trace(str(self.run_dir / "profile"))
            self._profiling = True

    def _stop_profile(self) -> None:
        if self._profiling:
            self._profiling = False
            jax.profiler.stop_trace()
            self._progress.message(f"profile: {self.run_dir / 'profile'}")

    def _finished(self, number: int, metrics: Mapping[str, jax.Array], seconds: float, waited: float) -> None:
        self._meter.record(number, seconds, waited)
        window = self.config.profile
        if window.start_step is not None and number == window.start_step + window.num_steps:
            self._stop_profile()
        logged = number % self.config.logging.every == 0 or number in (self._start + 1, self.config.train.steps)
        if logged:
            self._log(number, metrics)
        else:
            self._progress.update(number, {})
        collector.resume()  # beside the next step, which is under way

    def _log(self, number: int, metrics: Mapping[str, jax.Array]) -> None:
        values = flat_scalars(jax.device_get(dict(metrics)))
        standard = {name: values.pop(name) for name in ("loss", "grad_norm", "learning_rate", "skipped_steps")}
        for name in ("weight", "skipped_in_a_row"):
            values.pop(name)
        self._row = self._meter.row(number, **standard, device_memory_bytes=device_memory_bytes(), more=values)
        if self._writers is not None:
            self._writers.scalars(number, self._row)
        self._progress.update(number, self._row)

    def _wants_pause(self, number: int) -> bool:
        assert self._checkpointer is not None
        self._checkpointer.check()
        return self._is_due(number, self.config.checkpoint.every) or self._is_due(number, self.config.evaluation.every)

    @staticmethod
    def _is_due(number: int, every: int | None) -> bool:
        return every is not None and number % every == 0

    def _pause(self, number: int, state: TrainState) -> None:
        if self._is_due(number, self.config.evaluation.every):
            self._evaluate(number, state)
        if self._is_due(number, self.config.checkpoint.every):
            self._save(number, state)

    def _evaluate(self, number: int, state: TrainState) -> None:
        from jaxtrain.data import Batches, prefetch

        if self._run.data.validation is None or self._evaluated_at == number:
            return
        rows = Batches(
            self._run.data.validation,
            self.config.train.global_batch_size,
            seed=self.config.seed,
            shuffle=False,
            workers=reading_threads(self.config),
        )
        count = min(len(rows), self.config.evaluation.max_batches or len(rows))
        loaded = prefetch(self._run.step.loader(rows), 0, count, depth=1)
        try:
            self._evaluation = flat_scalars(self._evaluator(state, (batch for batch, _ in loaded)))
        finally:
            loaded.close()
        self._evaluated_at = number
        if self._writers is not None and not self._was_done:
            self._writers.scalars(number, self._evaluation)
        shown = "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in self._evaluation.items())
        self._progress.message(f"step {number}: {shown}")

    def _save(self, number: int, state: TrainState) -> None:
        assert self._checkpointer is not None
        loss = self._evaluation.get("eval_loss") if self._evaluated_at == number else None
        self._checkpointer.save(number, state, metadata=self._record(), eval_loss=loss)

    def _record(self) -> dict[str, Any]:
        """What a checkpoint says of the run that wrote it."""
        return {
            "name": self.loaded.name,
            "config": self.config.model_dump(mode="json"),
            "stream": json.loads(json.dumps(self._run.stream)),
            "from_python": self._own_parts,
        }

    def _sample(self) -> str | None:
        prompt, tokenizer = self.config.evaluation.sample_prompt, self._run.data.tokenizer
        if prompt is None or tokenizer is None or self._run.step.model.decoder is None:
            return None
        from jaxtrain.inference.generate import Sampling, generate_text

        settings = self.config.evaluation
        length, limit = max(len(tokenizer.encode(prompt)), 1), self._run.step.model.decoder.max_length
        room = limit - length
        if room < 1:
            self._progress.message(f"no sample: evaluation.sample_prompt has {length} tokens, the model takes {limit}")
            return None
        with self._progress.phase("sampling"):
            text = generate_text(
                self._run.step,
                self._state.evaluation_params,
                tokenizer,
                [prompt],
                new_tokens=min(settings.sample_tokens, room),
                sampling=Sampling(settings.sample_temperature),
                seed=self.config.seed,
            )[0]
        if self._main:
            (self.run_dir / "sample.txt").write_text(text, encoding="utf-8")
            if self._writers is not None and not self._was_done:
                self._writers.text(self.config.train.steps, "sample", text)
        return text
