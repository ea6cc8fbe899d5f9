"""A multilayer perceptron over flattened inputs.

Shapes: B batch, D input features, O outputs.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.models import MLPConfig
from jaxtrain.errors import ConfigError
from jaxtrain.models.from_nnx import from_nnx
from jaxtrain.models.initializers import fan_in_normal
from jaxtrain.models.layers import Linear, dropout
from jaxtrain.models.model import DrawsByRow, Model
from jaxtrain.models.shipped.axes import mlp_axes
from jaxtrain.models.shipped.shapes import dense_layers
from jaxtrain.ops.activation import gelu

_ACTIVATIONS = {"relu": jax.nn.relu, "gelu": gelu}


class MLP(nnx.Module):
    """Hidden layers with a nonlinearity, and a linear output."""

    def __init__(self, config: MLPConfig, inputs: int, outputs: int, rngs: nnx.Rngs):
        init, last = fan_in_normal(2.0), fan_in_normal(1.0)
        *hidden, output = dense_layers(config, inputs, outputs).values()
        self.layers = nnx.List(
            [Linear(one.inputs, one.outputs, bias=True, initializer=init, rngs=rngs) for one in hidden]
        )
        self.output = Linear(output.inputs, output.outputs, bias=True, initializer=last, rngs=rngs, low_precision=False)
        self.config = config

    def __call__(self, x: jax.Array, *, key: jax.Array | None) -> jax.Array:
        x_BD = x.reshape(x.shape[0], -1)
        for index, layer in enumerate(self.layers):
            x_BD = _ACTIVATIONS[self.config.activation](layer(x_BD))
            x_BD = dropout(x_BD, self.config.dropout, None if key is None else jax.random.fold_in(key, index))
        return self.output(x_BD)


def mlp(config: MLPConfig, *, input_shape: tuple[int, ...], num_outputs: int | None = None) -> Model:
    """An MLP as a `Model`: float inputs [B, ...] to outputs [B, O].

    Args:
        config: widths and nonlinearity.
        input_shape: shape of one row.
        num_outputs: used where the config leaves its own out.

    Raises:
        ConfigError: no output count anywhere.
    """
    outputs = config.num_outputs or num_outputs
    if outputs is None:
        raise ConfigError("model.num_outputs is not set and the data names no outputs; set model.num_outputs")

    def make(rngs: nnx.Rngs) -> MLP:
        return MLP(config, math.prod(input_shape), outputs, rngs)

    def call(module: Any, inputs: jax.Array, key: jax.Array | None, train: bool) -> jax.Array:
        if jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ConfigError("model.kind=mlp takes numbers, but the data gives token ids")
        return module(inputs, key=key if train and config.dropout > 0 else None)

    model = from_nnx(make, axes=mlp_axes(len(config.hidden_dims)), call=DrawsByRow(call), name="mlp")
    return dataclasses.replace(model, num_outputs=outputs)
