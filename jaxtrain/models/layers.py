"""Layers of the shipped models as NNX modules; they compute in the dtype of their input.

Shapes: B batch, L length, H heads, K head_dim.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.arguments import refusal
from jaxtrain.config.models import RopeScaling
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import row_numbers
from jaxtrain.models.initializers import Initializer
from jaxtrain.ops.linear import linear


class Linear(nnx.Module):
    """A linear layer over the last dims of its input, with or without a bias.

    Its kernel has the shape [*inputs, *outputs] and its bias [*outputs], both float32.

    Args:
        inputs: sizes of the dims of the input that the layer contracts; they are its last ones.
        outputs: sizes of the dims that take their place.
        bias: whether a bias is added.
        initializer: draws the kernel.
        rngs: random streams; `params` draws the kernel.
        low_precision: whether the precision policy of the step may multiply this layer in fewer bits, and `quantize`
            may store its kernel in 8 bits.
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
        # Not `[...]`, because a quantized kernel is not an array.
        kernel = self.kernel.get_value()
        return linear(x, kernel, bias, num_input_dims=self.num_input_dims, low_precision=self.low_precision)


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last dim, computed in float32 and returned in the dtype of the input.

    Args:
        dim: size of the last dim.
        kind: "layernorm" or "rmsnorm".
        bias: whether LayerNorm has a bias; RMSNorm has none.
        epsilon: added to the mean of squares before its root is taken.
    """

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
    """Apply inverted dropout; without a key or at rate 0 the result is the input itself.

    Each row draws from a key that is folded with its number in the batch, so that the mask is the same on every mesh.

    Args:
        x: [B, ...], any float dtype.
        rate: share of the elements that become 0.
        key: random key, the same on every shard; None: no dropout.

    Returns:
        The shape and dtype of x.

    Raises:
        ConfigError: a rate that is no number from 0 to below 1, or a key that is none.

    Example:
        >>> jt.dropout(jnp.ones((2, 4)), 0.5, None).tolist()  # without a key: evaluation
        [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
        >>> dropped = jt.dropout(jnp.ones((2, 4)), 0.5, jax.random.key(0))
    """
    write = "dropout(x, 0.1, key) with key=jax.random.key(0)"
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ConfigError(refusal("dropout: rate", "a number from 0 to below 1", rate, write))
    if key is not None and not isinstance(key, jax.Array):
        raise ConfigError(refusal("dropout: key", "a random key, or None", key, write))
    if rate == 0 or key is None:
        return x
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, row_numbers(x.shape[0]))
    keep = jax.vmap(lambda row_key: jax.random.bernoulli(row_key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Compute by how much each pair of dims is rotated per position.

    Source: Su et al. 2021. The scaling is that of Llama 3.1: low frequencies are divided by the factor, high ones are
    kept, and a linear ramp joins the two.

    Args:
        head_dim: dims of a head.
        theta: base of the frequencies.
        scaling: for sequences longer than those of the first training; None: no scaling.

    Returns:
        Radians per position, float32 [head_dim / 2].
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    ramp = jnp.clip((scaling.original_length / wavelengths - low) / (high - low), 0.0, 1.0)
    return frequencies * (ramp + (1 - ramp) / scaling.factor)


def rotate(x_BLHK: jax.Array, positions_BL: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Apply the rotary position embedding to queries or keys; the first half of the dims is paired with the second.

    Args:
        x_BLHK: queries or keys, any float dtype; the rotation is computed in float32.
        positions_BL: positions of the tokens, integers; a batch of 1 serves all rows.
        frequencies: radians per position, float32 [K / 2].

    Returns:
        [B, L, H, K] in the dtype of x_BLHK.
    """
    angles = positions_BL[..., None].astype(jnp.float32) * frequencies  # [B, L, K / 2]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BLHK.dtype)
