"""From a spec and its data to the objects of a run: batches, mesh and step. Nothing is allocated on a device."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.config.base import Call
from jaxtrain.config.kinds import check_kinds, check_sizes
from jaxtrain.config.schema import Config
from jaxtrain.data import Batches, Data
from jaxtrain.data.configured import stream_of, training_batches, with_counted_steps
from jaxtrain.data.stream import BatchStream
from jaxtrain.errors import ConfigError
from jaxtrain.models.model import count_parameters
from jaxtrain.run.spec import RunSpec
from jaxtrain.train.build import build_step, with_output_scale
from jaxtrain.train.step import TrainStep


@dataclass(frozen=True)
class Run:
    """What a spec describes, ready to compile.

    Attributes:
        spec: what the run was made from.
        config: that of the spec, its epochs as steps.
        data, batches: the rows, and how training takes them.
        step: the train step.
        num_parameters: those of the model.
    """

    spec: RunSpec
    config: Config
    data: Data
    batches: Batches | BatchStream
    step: TrainStep
    num_parameters: int

    @property
    def stream(self) -> dict[str, Any]:
        """What decides which rows batch k holds; a checkpoint of another stream is refused."""
        return stream_of(self.config, self.data)


def assemble(spec: RunSpec, data: Data) -> Run:
    """Build model, optimizer, mesh and step of a run.

    Raises:
        ConfigError: parts that do not fit together, or sizes that do not divide.
    """
    config = with_counted_steps(spec.config, data)
    batches = training_batches(config, data)
    shapes = batches.spec()
    model_config = config
    if spec.model is None:
        _check_fit(config, data, shapes.get("targets"), has_own_task=spec.task is not None)
        # With the scale of the targets as that of the outputs.
        model_config = with_output_scale(
            config, data.reading, task=config.task if spec.task is None else spec.task.name
        )
    step = build_step(
        model_config,
        input_shape=data.input_shape,
        vocab_size=data.vocab_size,
        num_outputs=data.num_outputs,
        model=spec.model,
        task=spec.task,
        optimizer=spec.optimizer,
        learning_rate=spec.learning_rate,
        trainable=spec.trainable,
        rules=spec.rules,
        mesh=spec.mesh,
        skip=spec.skip,
    )
    step.batch_shardings(shapes)  # a batch that does not divide fails here, before anything is traced
    return Run(spec, config, data, batches, step, count_parameters(step.model))


def _check_fit(config: Config, data: Data, targets: Any, *, has_own_task: bool) -> None:
    """Raise a `ConfigError` if task, model and data, whose batches have `targets`, do not belong together."""
    check_kinds(config, own_task=has_own_task, own_data=True)
    has_own_task = has_own_task or isinstance(config.task, Call)
    if not isinstance(targets, jax.ShapeDtypeStruct):
        if not has_own_task and config.task != "contrastive":
            raise ConfigError(f"task={config.task} needs an entry 'targets' in the rows of the data, which have none")
    else:
        are_classes = np.issubdtype(targets.dtype, np.integer)
        if config.task == "regression" and are_classes:
            raise ConfigError("task=regression, but the targets of the data are classes; set task=classification")
        if config.task == "classification" and not are_classes:
            more = " (and data.task=classification if they name classes)" if config.data.kind == "table" else ""
            raise ConfigError(
                f"task=classification, but the targets of the data are numbers; set task=regression{more}"
            )
    length = None
    if data.unit == "tokens":
        length = data.input_shape[-1] if data.input_shape else 0
    check_sizes(
        config,
        vocab_size=data.vocab_size,
        num_outputs=data.num_outputs,
        sequence_length=length,
        decoder_length=data.decoder_length,
    )
