"""From a config and its data to the objects of a run: batches, mesh and step. Nothing is allocated on a device."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxtrain.config.base import Call
from jaxtrain.config.kinds import check_kinds, check_sizes
from jaxtrain.config.schema import Config, TrainConfig
from jaxtrain.data import Batches, Data
from jaxtrain.data.configured import training_batches
from jaxtrain.data.stream import BatchStream
from jaxtrain.errors import ConfigError
from jaxtrain.models.model import Model, count_parameters
from jaxtrain.models.task import Task
from jaxtrain.train.build import OwnStep, build_step, with_output_scale
from jaxtrain.train.step import TrainStep


@dataclass(frozen=True)
class Run:
    """What a config describes, ready to compile."""

    config: Config
    name: str
    data: Data
    batches: Batches | BatchStream
    step: TrainStep
    num_parameters: int

    @property
    def stream(self) -> dict[str, Any]:
        """What decides which rows batch k holds; a checkpoint of another stream is refused."""
        config = self.config
        return {
            **self.data.fingerprint,
            "seed": config.seed,
            "global_batch_size": config.train.global_batch_size,
        }


def _with_steps(config: Config, data: Data) -> Config:
    """Return a config whose `train.epochs` are steps; the last batch may go beyond the last pass."""
    epochs = config.train.epochs
    if epochs is None:
        return config
    if isinstance(data.train, BatchStream):
        raise ConfigError(f"epochs={epochs:g}, but an iterable of batches has no known length; give steps=")
    steps = epochs * len(data.train) / config.train.global_batch_size
    # A product of floats may lie a hair above the whole number that is meant: 1.1 * 100 is 110.00000000000001.
    is_close = math.isclose(steps, round(steps), rel_tol=1e-12)
    settings = vars(config.train) | {"epochs": None, "steps": round(steps) if is_close else math.ceil(steps)}
    return config.model_copy(update={"train": TrainConfig(**settings)})


def check_fit(config: Config, data: Data, targets: jax.ShapeDtypeStruct | None, *, own_task: bool) -> None:
    """Raise a `ConfigError` where task, model and data, whose batches may have `targets`, do not belong together."""
    check_kinds(config, own_task=own_task, own_data=True)
    own_task = own_task or isinstance(config.task, Call)
    integers = None if targets is None else np.issubdtype(targets.dtype, np.integer)
    if targets is None and not own_task and config.task != "contrastive":
        raise ConfigError(f"task={config.task} needs an entry 'targets' in the rows of the data, which have none")
    if (config.task == "classification" and integers is False) or (config.task == "regression" and integers):
        kinds, works = ("classes", "classification") if integers else ("numbers", "regression")
        if not integers and config.data.kind == "table":
            works += " (and data.task=classification if they name classes)"
        raise ConfigError(f"task={config.task}, but the targets of the data are {kinds}; set task={works}")
    check_sizes(
        config,
        vocab_size=data.vocab_size,
        num_outputs=data.num_outputs,
        sequence_length=next(reversed(data.input_shape), 0) if data.unit == "tokens" else None,
        decoder_length=data.decoder_length,
    )


def assemble(
    config: Config,
    data: Data,
    *,
    name: str = "run",
    model: Model | None = None,
    task: Task | None = None,
    own: OwnStep | None = None,
) -> Run:
    """Build model, optimizer, mesh and step from a config; see `build_step` and `OwnStep`."""
    config = _with_steps(config, data)
    batches = training_batches(config, data)
    spec = batches.spec()
    if model is None:
        targets = spec.get("targets")
        shape = targets if isinstance(targets, jax.ShapeDtypeStruct) else None
        check_fit(config, data, shape, own_task=task is not None)
    named = config.task if task is None else task.name
    step = build_step(
        config if model is not None else with_output_scale(config, data.reading, task=named),
        input_shape=data.input_shape,
        vocab_size=data.vocab_size,
        num_outputs=data.num_outputs,
        model=model,
        own=replace(own or OwnStep(), task=task),
    )
    step.batch_shardings(spec)  # a batch that does not divide fails here, before anything is traced
    return Run(config, name, data, batches, step, count_parameters(step.model))
