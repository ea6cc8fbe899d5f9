"""What a run is made of, before anything of it is opened: a config, and parts from Python in place of its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optax
from jax.sharding import Mesh

from jaxtrain.config import Loaded
from jaxtrain.config.schema import Config, EarlyStopping, EvaluationConfig
from jaxtrain.data import Data
from jaxtrain.metrics.progress import Progress
from jaxtrain.models.model import Model, ModelState, Params
from jaxtrain.models.task import Task
from jaxtrain.run.callbacks import Callback


@dataclass(frozen=True)
class RunSpec:
    """One run: `fit` makes it from its arguments, `run_config` from a config.

    Attributes:
        loaded: the config with its name, and where each key was set.
        run_dir: directory of the run.
        resume: None, auto, must or never, as for `run_config`.
        model, task, data, optimizer, mesh: from Python; None: as the config says.
        learning_rate: rate that the metrics show for such an optimizer; step -> rate, or a number.
        trainable: parameter path -> whether it is trained; None: as the config says.
        rules: logical axes -> mesh axes, added to the default rules.
        params, model_state, skip: what training starts from, as for `fit`.
        callbacks: called between the steps.
        progress: where phases and progress are shown; None: on standard error.
    """

    loaded: Loaded
    run_dir: Path
    resume: str | None = None
    model: Model | None = None
    task: Task | None = None
    data: Data | None = None
    optimizer: optax.GradientTransformation | None = None
    mesh: Mesh | None = None
    learning_rate: optax.Schedule | float | None = None
    trainable: Callable[[str], bool] | None = None
    rules: Mapping[str, tuple[str, ...]] | None = None
    params: Params | Any = None
    model_state: ModelState | None = None
    skip: Sequence[str] = ()
    callbacks: Sequence[Callback] = ()
    progress: Progress | None = None

    @property
    def config(self) -> Config:
        """The config, whose epochs may not be steps yet."""
        return self.loaded.config


def with_callbacks(spec: RunSpec, callbacks: Sequence[Callback | EarlyStopping]) -> RunSpec:
    """Return a spec with callbacks; early stopping among them becomes a setting of its config."""
    loaded = spec.loaded
    called = []
    for callback in callbacks:
        if isinstance(callback, EarlyStopping):
            evaluation = EvaluationConfig(**{**vars(loaded.config.evaluation), "early_stopping": callback})
            loaded = replace(loaded, config=loaded.config.model_copy(update={"evaluation": evaluation}))
        else:
            called.append(callback)
    return replace(spec, loaded=loaded, callbacks=called)
