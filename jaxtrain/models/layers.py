"""Layers of the shipped models as NNX modules; they compute in the dtype of their input.

Shapes: B batch, L sequence, D embed, H query heads, G key-value heads, K head dim, F MLP width, V vocabulary.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.models import RopeScaling
from jaxtrain.layout.sharding import row_numbers
from jaxtrain.models.initializers import Initializer
from jaxtrain.ops.linear import linear


class Linear(nnx.Module):
    """Kernel [*inputs, *outputs] over the last dims of the input, with or without a bias.

    `low_precision` says whether the step's policy may multiply it in fewer bits, and `quantize` store it so.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        *,
        bias: bool,
        initializer: Initializer,
        rngs: nnx.Rngs,
        low_precision: bool = True,
    ):
        self.kernel = nnx.Param(initializer(rngs.params(), (*inputs, *outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32)) if bias else None
        self.num_input_dims, self.num_output_dims = len(inputs), len(outputs)
        self.low_precision = low_precision

    def __call__(self, x: jax.Array) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        # Not `[...]`, because a quantized kernel is no array.
        kernel = self.kernel.get_value()
        return linear(x, kernel, bias, num_input_dims=self.num_input_dims, low_precision=self.low_precision)


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last dim, computed in float32."""

    def __init__(self, dim: int, *, kind: str, bias: bool, epsilon: float):
        self.scale = nnx.Param(jnp.ones((dim,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((dim,), jnp.float32)) if bias and kind == "layernorm" else None
        self.kind, self.epsilon = kind, epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.kind == "layernorm":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        y = y * self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout of [B, ...]; the input itself without a key or at rate 0.

    Each row draws from its own number in the batch, so that the mask is the same on every mesh.
    """
    if rate == 0 or key is None:
        return x
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, row_numbers(x.shape[0]))
    keep = jax.vmap(lambda row_key: jax.random.bernoulli(row_key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Rotation per position of each pair of dims: float32 [head_dim / 2].

    Source: Su et al. 2021; the scaling is that of Llama 3.1 (low frequencies slowed, high ones kept, a ramp between).
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    ramp = jnp.clip((scaling.original_length / wavelengths - low) / (high - low), 0.0, 1.0)
    return frequencies * (ramp + (1 - ramp) / scaling.factor)


def rotate(x_BLHK: jax.Array, positions_BL: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Rotary position embedding of queries or keys, first half of the dims paired with the second; float32 inside."""
    angles = positions_BL[..., None].astype(jnp.float32) * frequencies  # [B, L, K / 2]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BLHK.dtype)
