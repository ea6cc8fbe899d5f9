"""The tensors of the model that a workload trains, and which of them are trained. No jax here."""

import fnmatch
from collections.abc import Mapping

from jaxtrain.config.models import ModelConfig
from jaxtrain.errors import ConfigError
from jaxtrain.models.shipped import shapes
from jaxtrain.models.shipped.shapes import Tensors
from jaxtrain.models.shipped.structure import Structure, structure_of
from jaxtrain.plan.workload.record import Workload


def model_tensors(config: ModelConfig, workload: Workload) -> Tensors:
    """The tensors of the model that a config describes, for the rows of a workload."""
    return shapes.model_tensors(
        config,
        input_shape=workload.input_shape,
        vocab_size=workload.vocab_size,
        num_outputs=workload.num_outputs,
    )


def model_structure(config: ModelConfig, workload: Workload) -> Structure | None:
    """The stacks of transformer blocks of a model and the layers around them, for the rows of a workload."""
    return structure_of(
        config,
        input_shape=workload.input_shape,
        vocab_size=workload.vocab_size,
        num_outputs=workload.num_outputs,
        decoder_length=workload.decoder_length,
    )


def trained_paths(shapes: Mapping[str, tuple[int, ...]], freeze: tuple[str, ...]) -> set[str] | None:
    """The parameters that a config trains; None: all.

    Raises:
        ConfigError: patterns that match all of them.
    """
    frozen = frozen_paths(shapes, freeze)
    if frozen and len(frozen) == len(shapes):
        raise ConfigError("optimizer.freeze matches every parameter; leave one to train")
    return {*shapes} - frozen if frozen else None


def frozen_paths(shapes: Mapping[str, tuple[int, ...]], freeze: tuple[str, ...]) -> set[str]:
    """The parameters that a config's `optimizer.freeze` keeps as they are."""
    return {path for path in shapes if any(fnmatch.fnmatchcase(path, pattern) for pattern in freeze)}
