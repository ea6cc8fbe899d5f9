"""The tensors and the structure of the model that a workload trains. No jax here."""

from jaxtrain.config.model import ModelConfig
from jaxtrain.models.shipped import shapes
from jaxtrain.models.shipped.shapes import Structure, Tensors, structure_of
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
