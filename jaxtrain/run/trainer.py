"""A run from its config to its result: start the process, hold the directory, prepare, train."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.config import Loaded, load_config
from jaxtrain.config.arguments import check_choice, check_kind
from jaxtrain.config.local_path import local_path
from jaxtrain.metrics.progress import Progress
from jaxtrain.run.result import Result
from jaxtrain.runtime import distributed

if TYPE_CHECKING:
    from jaxtrain.data import Data
    from jaxtrain.models.model import Model
    from jaxtrain.models.tasks import Task


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
    progress: Progress | None = None,
) -> Result:
    """Train what a config describes, in its run directory, resuming where it stopped.

    Args:
        config: a shipped name, a path, a nested mapping, or what `load_config` gave.
        overrides: keys on top, dotted or nested: {"train.steps": 100}.
        run_dir: None: runs/<name>.
        resume: None goes on with the run that the directory holds if its configuration trains the same (more steps are
            allowed) and refuses another one; auto and must go on with whatever changed, must only if there is a
            checkpoint; never starts anew.
        emulate: pretend to have this many CPU devices.
        model, task, data: your own instead of the config's.
        progress: where phases and progress are shown; None: on standard error.

    Returns:
        The result, once all steps are done.

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
    _check_call(overrides, resume, progress)
    loaded = config if isinstance(config, Loaded) else load_config(config, keywords=overrides)
    folder = (
        local_path(run_dir, what="run directory")
        if run_dir is not None
        else Path("runs") / local_path(loaded.name, what="name")
    )
    distributed.start(emulate=emulate, compilation_cache=loaded.config.compilation_cache)
    _check_parts(model=model, task=task, data=data)
    if loaded.config.parallel.auto:
        from jaxtrain.plan.search.auto import choose_layout
        from jaxtrain.plan.workload.describe import RowSizes

        sizes = None if data is None else RowSizes(data.input_shape, data.vocab_size, data.num_outputs, unit=data.unit)
        loaded = choose_layout(loaded, own_model=model is not None, sizes=sizes)
    from jaxtrain.run.interrupt import Interrupt
    from jaxtrain.run.lock import RunLock

    main = distributed.is_main_process()
    shown = progress or Progress(process_index=0 if main else 1)
    with shown, distributed.on_main_process(RunLock(folder)), Interrupt() as interrupt:
        from jaxtrain.run.prepare import closing_on_failure, prepare_session
        from jaxtrain.run.session import close_session, train_session

        session = prepare_session(
            loaded,
            folder,
            resume=resume,
            model=model,
            task=task,
            data=data,
            progress=shown,
            interrupt=interrupt,
            main=main,
        )
        with closing_on_failure(lambda status: close_session(session, status)):
            return train_session(session)


def _check_call(overrides: Any, resume: Any, progress: Any) -> None:
    """Raise where an argument of `run_config` is of another type."""
    if overrides is not None:
        write = "overrides={'train.steps': 100}"
        check_kind(overrides, Mapping, what="run_config: overrides", takes="a dict of keys", write=write)
    if resume is not None:
        check_choice(resume, ("auto", "must", "never"), what="run_config: resume", write="resume='auto'")
    if progress is not None:
        write = "progress=None, which shows it on standard error"
        check_kind(progress, Progress, what="run_config: progress", takes="what shows it", write=write)


def _check_parts(*, model: "Model | None", task: "Task | None", data: "Data | None") -> None:
    """Raise where a part from Python is of another kind."""
    from jaxtrain.train.checks import check_data, check_model, check_task

    if model is not None:
        check_model(model)
    if task is not None:
        check_task(task)
    if data is not None:
        check_data(data)
