"""Model FLOPs of the step of a run."""

import math
from collections.abc import Mapping

import jax

from jaxtrain.metrics.flops import model_flops_per_row
from jaxtrain.models.model import LOW_RANK, Adapted, parameter_shapes
from jaxtrain.optim.masks import trainable_predicate
from jaxtrain.train.assemble import Run


def step_flops(run: Run) -> float | None:
    """Model FLOPs of a step of the config's model; None where a size that it needs is not known."""
    config, data, model = run.config, run.data, run.step.model
    shapes = parameter_shapes(model)
    adapted = model.adapted
    is_trained = trainable_predicate(config.optimizer.freeze, list(shapes)) if adapted is None else adapted.trains
    flops = model_flops_per_row(
        config.model,
        sequence_length=data.input_shape[-1] if data.unit == "tokens" else None,
        input_shape=data.input_shape,
        num_outputs=data.num_outputs,
        vocab_size=data.vocab_size,
        decoder_length=data.decoder_length,
        trained=None if is_trained is None else [path for path in shapes if is_trained(path)],
        adapters={} if adapted is None else _adapters(adapted, shapes),
    )
    # A pair of answers [2, L] is two texts.
    texts = math.prod(data.input_shape[:-1]) if data.unit == "tokens" else 1
    return None if flops is None else flops * texts * config.train.global_batch_size


def _adapters(adapted: Adapted, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, float]:
    """Kernel with an adapter -> elements of its two factors, as a multiple of its own."""
    kernels = parameter_shapes(adapted.original)
    factors = {path: sum(shapes[f"{path}/{name}"].size for name in LOW_RANK) for path in adapted.targets}
    return {path: size / kernels[path].size for path, size in factors.items()}
