"""A run from its config to its result: start the process, hold the directory, prepare, train."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.config import Loaded, load_config
from jaxtrain.config.schema import EarlyStoppingConfig, limits
from jaxtrain.config.secrets import redacted
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.history import flat
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.runinfo import package_versions, run_text
from jaxtrain.metrics.trackers import check_trackers
from jaxtrain.run.callbacks import Callback, EarlyStopping, Given, sorted_callbacks
from jaxtrain.run.directory import RunLock, folder_of
from jaxtrain.runtime import distributed
from jaxtrain.runtime.agreement import Facts, check_devices, together

if TYPE_CHECKING:
    import optax

    from jaxtrain.data import Data
    from jaxtrain.models.model import Model
    from jaxtrain.models.task import Task
    from jaxtrain.train.state import TrainState

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
    state: "TrainState"
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
    loaded = config if isinstance(config, Loaded) else load_config(config, keywords=overrides)
    given = {"model": model, "task": task, "data": data, "optimizer": optimizer}
    loaded.check_described(given=[part for part, value in given.items() if value is not None])
    folder = folder_of(loaded, run_dir)
    watchdog = limits(loaded.config.watchdog)
    lost = None if watchdog is None else watchdog.lost_seconds
    distributed.start(emulate=emulate, compilation_cache=loaded.config.compilation_cache, lost_seconds=lost)
    from jaxtrain.train.assemble import OwnStep
    from jaxtrain.train.parallelism import check_parts

    check_parts(**given)
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
    import jax

    loaded = _with_early_stopping(loaded, sorted_callbacks(given.callbacks)[1])
    from jaxtrain.run.interrupt import Interrupt
    from jaxtrain.run.watchdog import watched

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
        from jaxtrain.run.loop import train
        from jaxtrain.run.prepare import closing_on_failure, prepare_session
        from jaxtrain.run.session import close_session, final_metrics

        with interrupt.free_to_leave():
            session = prepare_session(loaded, folder, given, progress=shown, interrupt=interrupt, activity=activity)
        with closing_on_failure(lambda status: close_session(session, status)):
            state, done = train(session)
            return Result(folder, state, final_metrics(session), done)


def _with_early_stopping(loaded: Loaded, stopping: EarlyStopping | None) -> Loaded:
    """The config with early stopping from Python in its group `evaluation`."""
    if stopping is None:
        return loaded
    evaluation = loaded.config.evaluation
    if evaluation.every is None:
        raise ConfigError(
            "EarlyStopping compares evaluations during training, and evaluation.every is null; set it, such as "
            'evaluation={"every": 100}'
        )
    changed = evaluation.model_copy(update={"early_stopping": EarlyStoppingConfig(**vars(stopping))})
    return replace(loaded, config=loaded.config.model_copy(update={"evaluation": changed}))


def _facts(loaded: Loaded, run_dir: Path, resume: str | None) -> Facts:
    """What all processes must have alike before they compile: config, versions, directory."""
    from jaxtrain.run.resume import is_within

    # Both values of what differs are shown, and a secret that differs between hosts trains the same.
    config = flat(redacted(loaded.config.model_dump(mode="json")))
    facts = {
        key: (str(value), loaded.origins.get(key, ""))
        for key, value in config.items()
        if not is_within(key, MAY_DIFFER)
    }
    versions = {f"version of {package}": (str(version), "") for package, version in package_versions().items()}
    return {**facts, **versions, "directory of the run": (str(run_dir), ""), "--resume": (str(resume), "")}
