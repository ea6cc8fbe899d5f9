"""What a step of a config counts: tokens or examples, and the FLOPs and peak that utilization is computed from."""

import math

import jax

from jaxtrain.config.schema import Config
from jaxtrain.data import Data
from jaxtrain.data.rows import mean_tokens
from jaxtrain.metrics.flops import model_flops_per_row
from jaxtrain.metrics.throughput import Meter
from jaxtrain.models.model import LOW_RANK, Model, parameter_shapes
from jaxtrain.optim.optimizers import trainable_predicate
from jaxtrain.runtime.devices import peak_flops


def step_meter(config: Config, model: Model | None, data: Data, *, num_devices: int, reference: bool = False) -> Meter:
    """Return the meter of a step.

    Args:
        config: with the batch size and the number formats.
        model: the model that the config describes; None: another one, whose FLOPs are not known.
        data: whose rows are counted.
        num_devices: over which the step is spread.
        reference: whether the loss also runs the model that training started from.
    """
    unit = "examples"
    units_per_row = data.units_per_row
    if data.unit == "tokens":
        unit = "tokens"
        units_per_row = mean_tokens(data.train) or units_per_row
    flops = None if model is None else step_flops(config, model, data, reference=reference)
    peak = peak_flops(jax.devices()[0].device_kind, config.precision.policy)
    if peak is not None:
        peak *= num_devices
    return Meter(unit, units_per_row * config.train.global_batch_size, flops_per_step=flops, peak_flops=peak)


def step_flops(config: Config, model: Model, data: Data, *, reference: bool = False) -> float | None:
    """Return the model FLOPs of a step of a config on its data; None if a size that it needs is not known.

    `reference` is whether the loss also runs the model that training started from.
    """
    shapes = parameter_shapes(model)
    adapted = model.adapted
    adapters = {}
    if adapted is None:
        is_trained = trainable_predicate(config.optimizer.freeze, list(shapes))
    else:
        is_trained = adapted.trains
        kernels = parameter_shapes(adapted.original)
        # Elements of the two factors of an adapter, as a multiple of its kernel's.
        for path in adapted.targets:
            adapters[path] = sum(shapes[f"{path}/{name}"].size for name in LOW_RANK) / kernels[path].size
    trained = None
    if is_trained is not None:
        trained = [path for path in shapes if is_trained(path)]
    texts_per_row = 1
    length = None
    if data.unit == "tokens":
        length = data.input_shape[-1]
        texts_per_row = math.prod(data.input_shape[:-1])  # a pair of answers [2, L] is two texts
    flops = model_flops_per_row(
        config.model,
        sequence_length=length,
        input_shape=data.input_shape,
        num_outputs=data.num_outputs,
        vocab_size=data.vocab_size,
        decoder_length=data.decoder_length,
        trained=trained,
        adapters=adapters,
        reference=reference,
    )
    return None if flops is None else flops * texts_per_row * config.train.global_batch_size
