"""Model FLOPs of the step of a run."""

import math

from jaxtrain.metrics.flops import model_flops_per_row
from jaxtrain.models.model import parameter_shapes
from jaxtrain.optim.masks import trainable_predicate
from jaxtrain.train.assemble import Run


def step_flops(run: Run) -> float | None:
    """Model FLOPs of a step of the config's model; None where a size that it needs is not known."""
    config, data = run.config, run.data
    paths = list(parameter_shapes(run.step.model))
    is_trained = trainable_predicate(config.optimizer.freeze, paths)
    flops = model_flops_per_row(
        config.model,
        sequence_length=data.input_shape[-1] if data.unit == "tokens" else None,
        input_shape=data.input_shape,
        num_outputs=data.num_outputs,
        vocab_size=data.vocab_size,
        decoder_length=data.decoder_length,
        trained=None if is_trained is None else [path for path in paths if is_trained(path)],
    )
    # A pair of answers [2, L] is two texts.
    texts = math.prod(data.input_shape[:-1]) if data.unit == "tokens" else 1
    return None if flops is None else flops * texts * config.train.global_batch_size
