"""A run from its config to its result: start the process, hold the directory, make the session, train."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import optax

from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.config import Loaded, load_config
from jaxtrain.config.arguments import check_kind
from jaxtrain.config.fits import check_fits, fresh_notes
from jaxtrain.config.kinds import check_kinds
from jaxtrain.config.model import published_from
from jaxtrain.config.schema import EvaluationConfig, limits
from jaxtrain.config.secrets import redacted
from jaxtrain.data import Data
from jaxtrain.data.configured import open_run_data
from jaxtrain.errors import ConfigError, DivergedError, PreemptedError
from jaxtrain.inference.published import check_class_order
from jaxtrain.layout.mesh import make_mesh, mesh_notes
from jaxtrain.layout.rules import config_degrees
from jaxtrain.metrics.evaluation import TO_HOLD_OUT, Evaluator
from jaxtrain.metrics.format import format_bytes, format_count
from jaxtrain.metrics.history import flat, read_rows
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.runinfo import PACKAGES, package_versions, read_run_info, run_text
from jaxtrain.metrics.throughput import TimeSpent
from jaxtrain.metrics.trackers import check_trackers
from jaxtrain.models.model import Model
from jaxtrain.models.task import Task
from jaxtrain.plan.compile import sharded_bytes
from jaxtrain.run.assemble import Run, assemble
from jaxtrain.run.callbacks import EARLY_STOPPED, Callback, EarlyStopping, Given, Watch, sorted_callbacks
from jaxtrain.run.checkpointing import RunSaves, begin_folder, open_checkpoints, take_up_files
from jaxtrain.run.code import step_code
from jaxtrain.run.directory import RunLock, folder_of
from jaxtrain.run.loop import train
from jaxtrain.run.record import RunRecord, StepLog, run_meter
from jaxtrain.run.reference import first_reference, with_kept_reference
from jaxtrain.run.resume import (
    check_code,
    check_resumed,
    choose_start,
    describe_start,
    is_within,
    resumed_state,
    run_identity,
    run_metadata,
    start_of,
    trained_leaves,
)
from jaxtrain.run.session import Session
from jaxtrain.run.signals import Interrupt
from jaxtrain.run.watchdog import Activity, watched
from jaxtrain.runtime import distributed
from jaxtrain.runtime.compiler import cache_folder, option_notes, record_choices
from jaxtrain.runtime.devices import describe_devices, unused_accelerator
from jaxtrain.runtime.distributed import Facts, check_devices, is_main_process, together
from jaxtrain.train.build import OwnStep
from jaxtrain.train.state import TrainState, check_parts
from jaxtrain.weights.base import BaseRecord, without_base
from jaxtrain.weights.load import load_weights

# What a process may have of its own: where it finds and keeps files, what its host does ahead, and what only process 0
# writes. Whether data at another path is the same data is told by its content.
MAY_DIFFER = (
    *("compilation_cache", "data.path", "data.validation_path", "data.tokenizer.path", "train.prefetch"),
    *("train.workers", "logging.every", "logging.tensorboard", "logging.wandb", "logging.mlflow"),
    *("logging.project", "logging.tags"),
)


@dataclass(frozen=True)
class Result:
    """How a run ended; where a path of a run is taken, so is the result.

    Attributes:
        run_dir: where everything was written.
        state: the last state, on the mesh.
        metrics: last logged row and evaluation.
        step: steps done.

    Example:
        >>> overrides = {"train.steps": 2, "logging.report": False}
        >>> result = jt.run_config("digits_mlp", overrides=overrides, run_dir="runs/two")
        done: step 2, eval accuracy ..., eval loss ...
        >>> result.step, "eval_loss" in result.metrics
        (2, True)
    """

    run_dir: Path
    state: TrainState
    metrics: Mapping[str, float | int | None]
    step: int

    def __fspath__(self) -> str:
        return str(self.run_dir)

    def __repr__(self) -> str:
        return f"Result of {run_text(self.run_dir)}"


def run_config(
    config: str | Path | Mapping[str, Any] | Loaded,
    *,
    overrides: Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    resume: str | None = None,
    emulate: int | None = None,
    model: Model | None = None,
    task: Task | None = None,
    data: Data | None = None,
    optimizer: optax.GradientTransformation | None = None,
    learning_rate: optax.Schedule | float | None = None,
    callbacks: Sequence[Callback | EarlyStopping] = (),
    progress: Progress | None = None,
) -> Result:
    """Train what a config describes, in its run directory, resuming where it stopped.

    Args:
        config: a shipped name, a path, the directory of a run, a nested mapping, or what `load_config` gave.
        overrides: keys on top, dotted or nested: {"train.steps": 100}.
        run_dir: where the run is written; None: runs/<name>, or the run itself where `config` is the directory of one,
            which then goes on.
        resume: None goes on with the run that the directory holds if its configuration trains the same (more steps are
            allowed) and refuses another one; auto goes on with other settings, must with other code too, and only if
            there is a checkpoint; never starts anew.
        emulate: pretend to have this many CPU devices.
        model, task, data: your own instead of the config's.
        optimizer: any optax transformation instead of the config's, whose clipping, moving average, frozen parameters
            and offload still hold. A run that goes on needs it again.
        learning_rate: the rate of `optimizer` that metrics and report show, a number or a schedule; None: none.
        callbacks: `Callback` and `EarlyStopping`, called between the steps.
        progress: where phases and progress are shown; None: on standard error.

    Returns:
        The result, once all steps are done or the run has stopped early.

    Raises:
        ConfigError, DataError, CheckpointError: before training starts.
        DivergedError: non-finite steps in a row.
        PreemptedError: stopped by a signal; the state is saved, and the same call goes on from it.

    Example:
        >>> overrides = {"train.steps": 2, "logging.report": False}
        >>> result = jt.run_config("digits_mlp", overrides=overrides, run_dir="runs/digits")
        done: step 2, eval accuracy ..., eval loss ...
        >>> overrides["train.steps"] = 4  # the run in this directory goes on
        >>> result = jt.run_config("digits_mlp", overrides=overrides, run_dir="runs/digits")
        done: step 4, eval accuracy ..., eval loss ...
        >>> result.step
        4
    """
    loaded = config if isinstance(config, Loaded) else load_config(config, keywords=overrides)
    given = {"model": model, "task": task, "data": data, "optimizer": optimizer}
    loaded.check_described(given=[part for part, value in given.items() if value is not None])
    folder = folder_of(loaded, run_dir)
    watchdog = limits(loaded.config.watchdog)
    lost = None if watchdog is None else watchdog.lost_seconds
    distributed.start(emulate=emulate, compilation_cache=loaded.config.compilation_cache, lost_seconds=lost)
    check_parts(model=model, task=task, optimizer=optimizer)
    if data is not None:
        check_kind(data, Data, what="data", takes="a jaxtrain.Data", write="jaxtrain.open_data({'kind': ...})")
    if optimizer is None and learning_rate is not None:
        raise ConfigError(
            "learning_rate= is what the metrics show of optimizer=, which is not given; for the config's optimizer set "
            'overrides={"optimizer.learning_rate": ...}'
        )
    own_step = OwnStep(optimizer=optimizer, learning_rate=learning_rate)
    if loaded.config.parallel.auto:
        from jaxtrain.plan.search import choose_layout
        from jaxtrain.plan.workload import RowSizes

        sizes = None
        if data is not None:
            length = data.decoder_length
            sizes = RowSizes(data.input_shape, data.vocab_size, data.num_outputs, unit=data.unit, decoder_length=length)
        loaded = choose_layout(loaded, own_model=model is not None, sizes=sizes)
    return train_loaded(loaded, folder, Given(own_step, resume, model, task, data, callbacks, progress))


def train_loaded(loaded: Loaded, folder: Path, given: Given) -> Result:
    """Train in a process that has started: hold the directory, prepare, train; what `run_config` and `fit` share."""
    loaded = _with_early_stopping(loaded, sorted_callbacks(given.callbacks)[1])
    if jax.process_count() > 1:
        check_devices()
        together(lambda: None, says=lambda _: _facts(loaded, folder, given.resume))
    else:  # of several only the main one needs the packages, and it says so with its rows
        check_trackers(loaded.config.logging)
    main = distributed.is_main_process()
    shown = given.progress or Progress(process_index=0 if main else 1)
    with (
        Interrupt() as interrupt,
        shown,
        distributed.on_main_process(RunLock(folder)),
        watched(limits(loaded.config.watchdog), folder) as activity,
    ):
        with interrupt.free_to_leave():
            session = prepare_session(loaded, folder, given, progress=shown, interrupt=interrupt, activity=activity)
        with closing_on_failure(session.close):
            state, done = train(session)
            return Result(folder, state, session.final_metrics(), done)


def _with_early_stopping(loaded: Loaded, stopping: EarlyStopping | None) -> Loaded:
    """The config with early stopping from Python in its group `evaluation`."""
    if stopping is None:
        return loaded
    evaluation = EvaluationConfig(**{**vars(loaded.config.evaluation), "early_stopping": vars(stopping)})
    return replace(loaded, config=loaded.config.model_copy(update={"evaluation": evaluation}))


def _facts(loaded: Loaded, run_dir: Path, resume: str | None) -> Facts:
    """What all processes must have alike before they compile: config, versions, directory."""
    # Both values of what differs are shown, and a secret that differs between hosts trains the same.
    config = flat(redacted(loaded.config.model_dump(mode="json")))
    facts = {
        key: (str(value), loaded.origins.get(key, ""))
        for key, value in config.items()
        if not is_within(key, MAY_DIFFER)
    }
    versions = {f"version of {package}": (str(version), "") for package, version in package_versions().items()}
    return {**facts, **versions, "directory of the run": (str(run_dir), ""), "--resume": (str(resume), "")}


_STATUS: dict[type[BaseException], str] = {
    PreemptedError: "preempted",
    DivergedError: "diverged",
    KeyboardInterrupt: "stopped",
}


@contextlib.contextmanager
def closing_on_failure(close: Callable[[str], None]) -> Iterator[None]:
    """Close with the status of what went wrong (preempted, diverged, stopped or failed), and raise that."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):
            close(_STATUS.get(type(error), "failed"))
        raise


def prepare_session(
    loaded: Loaded,
    run_dir: Path,
    given: Given,
    *,
    progress: Progress,
    interrupt: Interrupt,
    activity: Activity,
) -> Session:
    """Make every part of a run; what was opened is closed again where a later part cannot be made."""
    spent = TimeSpent(during=activity.during)
    with spent.measure("reading data"):
        run = together(lambda: _assembled(loaded, given, progress), says=_facts_of)
    interrupt.check()
    metadata = run_metadata(run, given)
    checkpointer, owner = open_checkpoints(
        run.config.checkpoint,
        run_dir,
        name=run.name,
        identity=run_identity(metadata),
        resume=given.resume,
        report=progress.message,
    )
    with closing_on_failure(lambda status: checkpointer.close()):
        resumed = choose_start(checkpointer, given.resume)
        meter = run_meter(run, own_model=given.model is not None)
        notes = [*loaded.notes]
        if resumed is None and given.model is None:
            notes += _published_notes(run, given.own_step)
        if resumed is not None:
            changes = check_resumed(
                checkpointer, run.step, metadata, run_dir=run_dir, may_change=given.resume is not None
            )
            if run.config.checkpoint.directory is not None:
                take_up_files(checkpointer.directory, run_dir)
            if run.awaits_reference:
                metadata["reference"] = checkpointer.metadata().get("reference")
                run = with_kept_reference(run, run_dir, metadata["reference"])
        for line in _banner(run, run_dir, notes, units=f"{meter.units_per_step:,.0f} {run.data.unit}"):
            progress.message(line)
        with spent.measure("compiling"):
            traced = together(lambda: _Traced(run, given.own_step, progress))
        metadata["code"] = traced.code
        record = RunRecord(run_dir, spent, report=progress.message)
        callbacks = sorted_callbacks(given.callbacks)[0]
        if resumed is None:
            state, base = _first_state(run, given.own_step, traced, progress, spent)
        else:
            saved = checkpointer.metadata()
            same = together(
                lambda: check_code(saved, metadata, changes, run_dir=run_dir, may_change=given.resume == "must")
            )
            progress.message(f"resuming step {resumed} from {checkpointer.directory}: {same}")
            with progress.phase("restoring checkpoint"), spent.measure("creating state"):
                state, base = resumed_state(run, run_dir, given.own_step, checkpointer)
        start = 0 if resumed is None else int(state.step)
        watch = Watch(run.config, run_dir, callbacks, start=start, log=record.log)
        is_done = start >= run.config.train.steps
        has_ended = is_done or watch.status is not None
        if has_ended:
            how = "trained to" if is_done else "stopped early at"
            key = "train.steps" if is_done else "the patience"
            progress.message(f"already {how} step {start}: raise {key} to continue, or start again with --resume never")
        elif resumed is not None:
            with spent.measure("compiling"):
                _compile(run, traced, progress, None)
        interrupt.check()
        activity.begins_at(start)
        metadata["base"] = None if base is None else base.as_json()
        if resumed is None:
            # Only once the step runs: a mistake that shows in compiling leaves an earlier run as it was.
            if is_main_process():
                begin_folder(checkpointer.directory, run.config.checkpoint, run_dir, progress.message)
            if run.awaits_reference:
                with spent.measure("evaluation"):
                    run, metadata["reference"] = first_reference(run, state, run_dir, progress)
        is_over = has_ended and _has_closed(run_dir)
        logged = _logged(run_dir, start) if has_ended else {}
        if not is_over:
            record.open(loaded, run, metadata, start=start)
        return Session(
            run=run,
            run_dir=run_dir,
            start=start,
            state=state,
            metadata=metadata,
            checkpointer=checkpointer,
            saves=RunSaves(checkpointer, run.config.checkpoint, run_dir, report=progress.message, owner=owner),
            record=record,
            steps=StepLog(run, meter=meter, record=record, progress=progress),
            evaluator=Evaluator(run.step),
            watch=watch,
            progress=progress,
            interrupt=interrupt,
            activity=activity,
            has_ended=has_ended,
            is_over=is_over,
            metrics=logged,
            evaluated=start if "eval_loss" in logged else None,
        )


def _published_notes(run: Run, own_step: OwnStep) -> list[str]:
    model = run.config.model
    # A function of the user may bring weights along.
    if run.config.finetune.lora is not None and published_from(model) is None and model.kind != "called":
        raise ConfigError(
            "finetune.lora trains adapters beside weights that are there already, and this model starts from random "
            "ones; set model.from to a published model, or leave the group finetune out to train all weights"
        )
    check_fits(model)
    if own_step.params is None and not own_step.skip:
        check_class_order(run.config, (run.data.reading or {}).get("classes"))
    return fresh_notes(model)


def _assembled(loaded: Loaded, given: Given, progress: Progress) -> Run:
    """Read the data and build the step; degrees and kinds that do not fit fail before any data is read."""
    config = loaded.config
    data = given.data
    if given.own_step.mesh is None:
        make_mesh(**config_degrees(config.parallel), devices=None)
    if given.model is None and data is None:
        check_kinds(config, own_task=given.task is not None)
    with progress.phase("reading data") as phase:
        opened = data if data is not None else open_run_data(config)
        phase.note(opened.description[0] if opened.description else "")
    if config.evaluation.early_stopping is not None and opened.validation is None:
        raise ConfigError(f"evaluation.early_stopping needs held-out rows, and the data has none; {TO_HOLD_OUT}")
    return assemble(config, opened, name=loaded.name, model=given.model, task=given.task, own=given.own_step)


def _facts_of(run: Run) -> Facts:
    """What all processes must have alike: the rows of each batch, and the options that each compiler accepts."""
    options = run.step.compiler_options.used
    named = {f"data ({name})": value for name, value in flat(run.stream).items()}
    named |= {f"compiler option {name}": value for name, value in options.items()}
    return {name: (str(value), "") for name, value in named.items()}


def _has_closed(run_dir: Path) -> bool:
    """Whether run.json has the end of the run."""
    return bool(from_process_0(lambda: read_run_info(run_dir).get("status") in ("done", EARLY_STOPPED)))


def _logged(run_dir: Path, step: int) -> dict[str, Any]:
    """The metrics of training and evaluation that were logged of a step."""
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["step"] == step]
    return {name: value for row in rows if {"loss", "eval_loss"} & row.keys() for name, value in row.items()}


def _banner(run: Run, run_dir: Path, notes: Sequence[str], *, units: str) -> list[str]:
    """The lines that are shown before a run compiles: model, data, devices and what was chosen for it."""
    config = run.config
    step = run.step
    accumulation = config.train.accumulation_steps
    title = (
        f"{run.name}: {step.model.name}, {format_count(run.num_parameters)} parameters, "
        f"{config.train.steps:,} steps of {units}"
    )
    if accumulation > 1:
        title += f" in {accumulation} microbatches"
    lines = [title]
    trains = trained_leaves(step)
    if trains is not None:
        trained = sum(leaf.size for leaf in jax.tree.leaves(without_base(step.abstract_state, trains).params))
        lines.append(f"adapters: {trained:,} parameters are trained; checkpoints hold only these")
    leaves = zip(jax.tree.leaves(step.abstract_state), jax.tree.leaves(step.state_on_host), strict=True)
    on_host = sharded_bytes([leaf for leaf, is_on_host in leaves if is_on_host])
    on_device = sharded_bytes(step.abstract_state) - on_host
    degrees = " ".join(f"{axis}={size}" for axis, size in step.mesh.shape.items() if size > 1) or "one device"
    devices = f"devices: {describe_devices()} ({degrees}), {config.precision.policy}, "
    devices += f"state {format_bytes(on_device)} per device"
    if on_host:
        devices += f", {format_bytes(on_host)} on the host"
    lines += [
        *(f"data: {line}" for line in run.data.description),
        devices,
        f"compiled programs: {cache_folder(config.compilation_cache) or 'not kept'}",
        f"run directory: {run_dir}",
        *mesh_notes(step.mesh),
        *option_notes(step.compiler_options, asked=config.compiler_options),
        *notes,
    ]
    unused = unused_accelerator(jax.devices()[0].platform)
    return [*lines, unused] if unused else lines


def _first_state(
    run: Run, own_step: OwnStep, traced: "_Traced", progress: Progress, spent: TimeSpent
) -> tuple[TrainState, BaseRecord | None]:
    """Compile the step and create the state of a run that begins, and describe the base of its adapters."""
    start = start_of(run, own_step)
    with ThreadPoolExecutor(1) as pool:
        # Compiling the initialisation takes about as long as compiling the step, so the two run side by side.
        created = pool.submit(lambda: run.step.init(run.config.seed, load_weights(run.step, **start)))
        with spent.measure("compiling"):
            _compile(run, traced, progress, created)
        with progress.phase("creating state"), spent.measure("creating state"):
            state = jax.block_until_ready(created.result())
            return state, describe_start(run, state, start)


class _Traced:
    """The step of a run, traced for the shapes of its batches: its program, what was chosen, and the digests of it."""

    def __init__(self, run: Run, own_step: OwnStep, progress: Progress) -> None:
        with progress.phase("tracing") as phase, record_choices() as choices:
            self.program = run.step.trace(run.batches.spec())
            phase.note("; ".join(choices))
        self.choices = choices
        self.code = step_code(
            run.step,
            self.program,
            versions=str(package_versions((*PACKAGES, "equinox"))),
            draws_parameters=own_step.params is None and published_from(run.config.model) is None,
        )


def _compile(run: Run, traced: _Traced, progress: Progress, created: Future[TrainState] | None) -> None:
    """Compile the step that was traced, and show whether the program came from the cache.

    Another thread creates the state meanwhile. Of several processes, none goes on before both are done, because
    collectives of the two threads could meet in another order in another process.
    """
    seen: set[str] = set()
    own = threading.get_ident()  # the initialisation compiles at the same time

    def listen(event: str, **_: Any) -> None:
        if threading.get_ident() == own:
            seen.add(event.removeprefix("/jax/compilation_cache/"))

    def attempt() -> None:
        try:
            with progress.phase("compiling") as phase:
                run.step.use(traced.program.lower().compile(), choices=traced.choices)
                found = "cache_hits" in seen and "cache_misses" not in seen
                is_kept = run.config.compilation_cache is not None
                phase.note("from cache" if found else "cached next time" if is_kept else "")
        finally:
            if created is not None and jax.process_count() > 1:
                wait([created])

    jax.monitoring.register_event_listener(listen)
    try:
        together(attempt)
    finally:
        jax.monitoring.unregister_event_listener(listen)
