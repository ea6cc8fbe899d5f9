"""A run from its config to its result: start the process, hold the directory, prepare, train."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.config import Loaded, load_config
from jaxtrain.config.arguments import check_choice, check_kind, refusal
from jaxtrain.config.schema import EarlyStoppingConfig, NoticesConfig, limits
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.trackers import check_trackers
from jaxtrain.run.callbacks import Callback, sorted_callbacks
from jaxtrain.run.early_stopping import EarlyStopping
from jaxtrain.run.folder import folder_of
from jaxtrain.run.mended import mend_run
from jaxtrain.run.result import Result
from jaxtrain.runtime import distributed
from jaxtrain.runtime.agreement import said_by_main
from jaxtrain.runtime.files import files_for_the_group

if TYPE_CHECKING:
    import optax

    from jaxtrain.data import Data
    from jaxtrain.models.model import Model
    from jaxtrain.models.task import Task
    from jaxtrain.train.own_step import OwnStep


def run_config(
    config: str | Path | Mapping[str, Any] | Loaded,
    *,
    overrides: Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    resume: str | None = None,
    emulate: int | None = None,
    model: "Model | None" = None,
    task: "Task | None" = None,
    data: "Data | None" = None,
    optimizer: "optax.GradientTransformation | None" = None,
    learning_rate: "optax.Schedule | float | None" = None,
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
            allowed) and refuses another one; auto and must go on with whatever changed, must only if there is a
            checkpoint; never starts anew.
        emulate: pretend to have this many CPU devices.
        model, task, data: your own instead of the config's.
        optimizer: any optax transformation instead of the config's, whose `clip_norm`, `ema_decay`, `freeze` and
            `offload` still hold. A run that goes on needs it again.
        learning_rate: the rate that the metrics show, a number or a schedule; None: that of the optimizer.
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
    _check_call(config, overrides, resume, progress)
    mend_run(config if isinstance(config, str | Path) else None)
    loaded = config if isinstance(config, Loaded) else load_config(config, keywords=overrides)
    given = {"model": model, "task": task, "data": data, "optimizer": optimizer}
    loaded.check_described(given=[part for part, value in given.items() if value is not None])
    folder = folder_of(loaded, run_dir)
    watchdog = limits(loaded.config.watchdog)
    lost = None if watchdog is None else watchdog.lost_seconds
    distributed.start(emulate=emulate, compilation_cache=loaded.config.compilation_cache, lost_seconds=lost)
    _check_parts(model=model, task=task, data=data)
    own_step = _own_step(optimizer, learning_rate)
    if model is None:
        from jaxtrain.run.elastic import with_fitting_layout

        loaded = with_fitting_layout(loaded, folder)
    if loaded.config.parallel.auto:
        from jaxtrain.plan.search.auto import choose_layout
        from jaxtrain.plan.workload.describe import RowSizes

        sizes = None
        if data is not None:
            length = data.decoder_length
            sizes = RowSizes(data.input_shape, data.vocab_size, data.num_outputs, unit=data.unit, decoder_length=length)
        loaded = choose_layout(loaded, own_model=model is not None, sizes=sizes)
    return train_loaded(
        loaded,
        folder,
        resume=resume,
        model=model,
        task=task,
        data=data,
        own_step=own_step,
        callbacks=callbacks,
        progress=progress,
    )


def train_loaded(
    loaded: Loaded,
    folder: Path,
    *,
    resume: str | None,
    model: "Model | None",
    task: "Task | None",
    data: "Data | None",
    own_step: "OwnStep",
    callbacks: Sequence[Callback | EarlyStopping],
    progress: Progress | None,
) -> Result:
    """Train in a process that has started: hold the directory, prepare, train; what `run_config` and `fit` share.

    Args:
        loaded: the config.
        folder: directory of the run.
        resume, model, task, data, callbacks, progress: see `run_config`.
        own_step: further parts of the step that came from Python.

    Raises:
        ConfigError, DataError, CheckpointError, DivergedError, PreemptedError: see `run_config`.
    """
    import jax

    functions, stopping = sorted_callbacks(callbacks)
    loaded = _with_early_stopping(loaded, stopping)
    from jaxtrain.run.agreed import agree_on_start
    from jaxtrain.run.interrupt import Interrupt
    from jaxtrain.run.lock import RunLock, wait_for_holder
    from jaxtrain.run.watchdog import watched

    agree_on_start(loaded, folder, resume=resume)
    main = distributed.is_main_process()
    if jax.process_count() == 1:  # of several only the main one needs the packages, and it says so with its rows
        check_trackers(loaded.config.logging)
    shown, lock = progress or Progress(process_index=0 if main else 1), RunLock(folder)
    with Interrupt(loaded.config.notices or NoticesConfig()) as interrupt:

        def waits_on(is_held: bool) -> bool:
            is_held = said_by_main(is_held)
            if is_held:
                interrupt.check()
            return is_held

        with interrupt.free_to_leave():
            wait_for_holder(folder, looks=main, goes_on=waits_on)
        with (
            files_for_the_group(),
            shown,
            distributed.on_main_process(lock),
            watched(limits(loaded.config.watchdog), folder) as activity,
        ):
            from jaxtrain.run.prepare import closing_on_failure, prepare_session
            from jaxtrain.run.session import close_session
            from jaxtrain.run.train_session import train_session

            with interrupt.free_to_leave():
                if main:
                    mend_run(folder, shown.message)
                session = prepare_session(
                    loaded,
                    folder,
                    resume=resume,
                    model=model,
                    task=task,
                    data=data,
                    own_step=own_step,
                    callbacks=functions,
                    progress=shown,
                    interrupt=interrupt,
                    activity=activity,
                    lock=lock,
                    main=main,
                )
            with closing_on_failure(lambda status: close_session(session, status)), activity.noting_failure():
                return train_session(session)


def _with_early_stopping(loaded: Loaded, stopping: EarlyStopping | None) -> Loaded:
    """The config with early stopping from Python in its group `evaluation`.

    Raises:
        ConfigError: nothing is evaluated during training, or the config has another early stopping.
    """
    if stopping is None:
        return loaded
    evaluation, group = loaded.config.evaluation, EarlyStoppingConfig(**stopping.settings)
    if evaluation.every is None:
        raise ConfigError(
            "EarlyStopping compares evaluations during training, and evaluation.every is null; set it, such as "
            'evaluation={"every": 100}'
        )
    if evaluation.early_stopping not in (None, group):
        raise ConfigError("evaluation.early_stopping and an EarlyStopping among callbacks differ; give one of them")
    changed = evaluation.model_copy(update={"early_stopping": group})
    origins = {**loaded.origins, "evaluation.early_stopping": "callbacks"}
    return replace(loaded, config=loaded.config.model_copy(update={"evaluation": changed}), origins=origins)


def _own_step(
    optimizer: "optax.GradientTransformation | None", learning_rate: "optax.Schedule | float | None"
) -> "OwnStep":
    from jaxtrain.train.checks import check_optimizer
    from jaxtrain.train.own_step import OwnStep, check_shown

    check_shown(learning_rate)
    if optimizer is not None:
        check_optimizer(optimizer)
    elif learning_rate is not None:
        raise ConfigError(
            "learning_rate= is what the metrics show of optimizer=, which is not given; for the config's optimizer set "
            'overrides={"optimizer.learning_rate": ...}'
        )
    return OwnStep(optimizer=optimizer, learning_rate=learning_rate)


def _check_call(config: Any, overrides: Any, resume: Any, progress: Any) -> None:
    """Raise where an argument of `run_config` is of another type."""
    if config is None:  # all defaults to load_config: a thousand steps of a model that nobody asked for
        takes = "a shipped name, a path, the directory of a run or a dict"
        raise ConfigError(refusal("run_config: config", takes, config, "run_config('quickstart')"))
    if overrides is not None:
        write = "overrides={'train.steps': 100}"
        check_kind(overrides, Mapping, what="run_config: overrides", takes="a dict of keys", write=write)
    if resume is not None:
        check_choice(resume, ("auto", "must", "never"), what="run_config: resume", write="resume='auto'")


def _check_parts(*, model: "Model | None", task: "Task | None", data: "Data | None") -> None:
    """Raise where a part from Python is of another kind."""
    from jaxtrain.train.checks import check_data, check_model, check_task

    if model is not None:
        check_model(model)
    if task is not None:
        check_task(task)
    if data is not None:
        check_data(data)
