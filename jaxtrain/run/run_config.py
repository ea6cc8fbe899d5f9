"""A run of a config: `run_config` makes the spec that the config says, and trains it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optax

from jaxtrain.config import Loaded, load_config
from jaxtrain.config.arguments import check_kind
from jaxtrain.config.schema import EarlyStopping, WatchdogConfig
from jaxtrain.data import Data
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.progress import Progress
from jaxtrain.models.model import Model
from jaxtrain.models.task import Task
from jaxtrain.run.callbacks import Callback
from jaxtrain.run.directory import folder_of
from jaxtrain.run.spec import RunSpec, with_callbacks
from jaxtrain.run.trainer import Result, train
from jaxtrain.runtime import distributed
from jaxtrain.train.state import check_parts


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
        overrides: keys on top, dotted or nested: {"train.steps": 100}; what `load_config` gave takes none.
        run_dir: where the run is written; None: runs/<name>, or the run itself where `config` is the directory of one,
            which then goes on.
        resume: None goes on with the run that the directory holds if its configuration trains the same (more steps are
            allowed) and refuses another one; auto goes on with other settings, must with other code too, and only if
            there is a checkpoint; never starts anew.
        emulate: pretend to have this many CPU devices.
        model, task, data: your own instead of the config's.
        optimizer: any optax transformation instead of the config's. Clipping, moving average, frozen parameters and
            offload of the config still hold. A run that goes on needs it again.
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
    if not isinstance(config, Loaded):
        loaded = load_config(config, keywords=overrides)
    elif overrides:
        raise ConfigError("overrides= are not set on a config that is loaded; write load_config(..., keywords={...})")
    else:
        loaded = config
    parts = {"model": model, "task": task, "data": data, "optimizer": optimizer}
    loaded.check_described(given=[name for name, part in parts.items() if part is not None])
    folder = folder_of(loaded, run_dir)
    watchdog = loaded.config.watchdog or WatchdogConfig()
    distributed.start(
        emulate=emulate,
        compilation_cache=loaded.config.compilation_cache,
        lost_seconds=watchdog.lost_seconds,
    )
    check_parts(model=model, task=task, optimizer=optimizer)
    if data is not None:
        check_kind(data, Data, what="data", takes="a jaxtrain.Data", write="jaxtrain.open_data({'kind': ...})")
    if optimizer is None and learning_rate is not None:
        raise ConfigError(
            "learning_rate= is what the metrics show of optimizer=, which is not given; for the config's optimizer set "
            'overrides={"optimizer.learning_rate": ...}'
        )
    spec = RunSpec(
        loaded,
        folder,
        resume,
        model=model,
        task=task,
        data=data,
        optimizer=optimizer,
        learning_rate=learning_rate,
        progress=progress,
    )
    spec = with_callbacks(spec, callbacks)
    if loaded.config.parallel.auto:
        spec = _with_layout(spec)
    return train(spec)


def _with_layout(spec: RunSpec) -> RunSpec:
    """Return the spec with the degrees that the planner chooses for this machine."""
    from jaxtrain.plan.search import choose_layout
    from jaxtrain.plan.workload import RowSizes

    sizes = None
    data = spec.data
    if data is not None:
        sizes = RowSizes(
            data.input_shape, data.vocab_size, data.num_outputs, unit=data.unit, decoder_length=data.decoder_length
        )
    return replace(spec, loaded=choose_layout(spec.loaded, own_model=spec.model is not None, sizes=sizes))
