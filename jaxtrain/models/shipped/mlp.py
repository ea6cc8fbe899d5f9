"""A multilayer perceptron over flattened inputs.

Shapes: B batch, I input features, O output features.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.model import MLPConfig
from jaxtrain.config.schema import Remat
from jaxtrain.errors import ConfigError
from jaxtrain.models.from_nnx import from_nnx
from jaxtrain.models.initializers import fan_in_normal
from jaxtrain.models.layers import ACTIVATIONS, Linear, dropout
from jaxtrain.models.model import DrawsByRow, Model
from jaxtrain.models.shipped.shapes import dense_layers, model_tensors, size_of


class MLP(nnx.Module):
    """Hidden layers with a nonlinearity, and a linear output layer."""

    def __init__(self, config: MLPConfig, inputs: int, outputs: int, rngs: nnx.Rngs):
        init, last = fan_in_normal(2.0), fan_in_normal(1.0)
        *hidden, output = dense_layers(config, inputs, outputs).values()
        self.layers = nnx.List(
            [Linear(one.inputs, one.outputs, bias=True, initializer=init, rngs=rngs) for one in hidden]
        )
        self.output = Linear(output.inputs, output.outputs, bias=True, initializer=last, rngs=rngs, low_precision=False)
        self.config = config

    def __call__(self, x: jax.Array, *, key: jax.Array | None) -> jax.Array:
        x_BI = x.reshape(x.shape[0], -1)
        for index, layer in enumerate(self.layers):
            x_BI = ACTIVATIONS[self.config.activation](layer(x_BI))
            x_BI = dropout(x_BI, self.config.dropout, None if key is None else jax.random.fold_in(key, index))
        return self.output(x_BI)


def mlp(
    config: MLPConfig,
    *,
    input_shape: tuple[int, ...],
    vocab_size: int | None = None,
    num_outputs: int | None = None,
    remat: Remat | None = None,
) -> Model:
    """Make an MLP as a `Model`, which maps float inputs [B, ...] to outputs [B, O]; `remat` means nothing."""
    outputs, scale = size_of("num_outputs", config.num_outputs, num_outputs), config.output_scale
    if scale is not None:
        for name, numbers in (("mean", scale.mean), ("deviation", scale.deviation)):
            if len(numbers) not in (1, outputs):
                raise ConfigError(
                    f"model.output_scale.{name} has {len(numbers)} numbers, not one or {outputs}, as there are outputs"
                )

    def make(rngs: nnx.Rngs) -> MLP:
        return MLP(config, math.prod(input_shape), outputs, rngs)

    def call(module: Any, inputs: jax.Array, key: jax.Array | None, train: bool) -> jax.Array:
        if jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ConfigError(
                "model.kind=mlp takes floats, but the data gives integers (token ids); set model.kind=transformer"
            )
        outputs_BO = module(inputs, key=key if train and config.dropout > 0 else None)
        if scale is None:
            return outputs_BO
        mean_O, deviation_O = (jnp.asarray(numbers, jnp.float32) for numbers in (scale.mean, scale.deviation))
        return mean_O + deviation_O * outputs_BO.astype(jnp.float32)

    axes = dict(model_tensors(config, input_shape=input_shape, num_outputs=outputs).axes)
    model = from_nnx(make, axes=axes, call=DrawsByRow(call), name="mlp")
    return dataclasses.replace(model, num_outputs=outputs)
