"""Layers of the shipped models as NNX modules, dropout and rotary positions; they compute in the dtype of their input.

Shapes: B batch, L length, H heads, K head_dim, R rotated dims of a head.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config.model import TransformerConfig
from jaxtrain.config.rope import AnyRope, LinearRope, LongRope, RopeScaling, YarnRope
from jaxtrain.errors import ConfigError
from jaxtrain.formats.rope import longrope_factor
from jaxtrain.models.initializers import Initializer
from jaxtrain.ops.elementwise import aligned, drop_by_row, gelu
from jaxtrain.ops.linear import linear

# Nonlinearities without a gate.
ACTIVATIONS = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


class Linear(nnx.Module):
    """A linear layer over the last dims of its input, with or without a bias.

    Its kernel has the shape [*inputs, *outputs] and its bias [*outputs], both float32. With `low_precision` the policy
    of a step may multiply it in fewer bits, and `quantize` may store its kernel so.
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


def normalized(x: jax.Array, epsilon: float, axes: tuple[int, ...] = (-1,)) -> jax.Array:
    """Divide by the root mean square over some dims, in float32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=axes, keepdims=True) + epsilon)).astype(x.dtype)


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last dims, in float32.

    The parameters have the shape `dims`, of which the last `over` are normalized; `offset`: they are the scale less 1.
    """

    def __init__(self, *dims: int, kind: str, bias: bool, epsilon: float, offset: bool = False, over: int = 1):
        self.scale = nnx.Param(jnp.zeros(dims, jnp.float32) if offset else jnp.ones(dims, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(dims, jnp.float32)) if bias and kind == "layernorm" else None
        self.kind, self.epsilon, self.offset = kind, epsilon, offset
        self.axes = tuple(range(-over, 0))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.kind == "layernorm":
            y = y - jnp.mean(y, axis=self.axes, keepdims=True)
        y = normalized(y, self.epsilon, self.axes)
        scale = aligned(self.scale[...].astype(jnp.float32), y)
        y = y * (1 + scale if self.offset else scale)
        if self.bias is not None:
            y = y + aligned(self.bias[...].astype(jnp.float32), y)
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
        ConfigError: a rate that is not from 0 to below 1.

    Example:
        >>> jt.dropout(jnp.ones((2, 4)), 0.5, None).tolist()  # without a key: evaluation
        [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
        >>> dropped = jt.dropout(jnp.ones((2, 4)), 0.5, jax.random.key(0))
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"dropout: rate={rate} is not from 0 to below 1, such as 0.1")
    if rate == 0 or key is None:
        return x
    return drop_by_row(x, rate, key)


def scaled(x: jax.Array, factor: float | jax.Array) -> jax.Array:
    """The product of an array of floats with a factor that is not rounded to its dtype (in bf16, 0.22 is 0.2197)."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def rotary_frequencies(dims: int, theta: float, scaling: AnyRope | None, *, length: int = 1) -> jax.Array:
    """By how much each pair of dims is rotated per position: radians, float32 [dims / 2]; Su et al. 2021."""
    frequencies = theta ** (-jnp.arange(0, dims, 2, dtype=jnp.float32) / dims)
    match scaling:
        case None:
            return frequencies
        case RopeScaling():
            wavelengths = 2 * math.pi / frequencies
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            ramp = jnp.clip((scaling.original_length / wavelengths - low) / (high - low), 0.0, 1.0)
            return frequencies * (ramp + (1 - ramp) / scaling.factor)
        case LinearRope():
            return frequencies / scaling.factor
        case YarnRope():
            kept = _yarn_kept(dims, theta, scaling)
            return frequencies * (kept + (1 - kept) / scaling.factor)
        case LongRope():
            long = length > scaling.original_length
            return frequencies / np.asarray(scaling.long_factors if long else scaling.short_factors, np.float32)


def _yarn_kept(dims: int, theta: float, scaling: YarnRope) -> np.ndarray:
    """The share of each frequency that stays as it is: 1 for many rotations, 0 for few, float32 [dims / 2]."""

    def dim_of(rotations: float) -> float:
        """The pair of dims that rotates so often over the original length."""
        return dims * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    # A ramp of no width would divide by zero.
    width = last - first or 0.001
    return 1 - np.clip((np.arange(dims // 2, dtype=np.float32) - first) / width, 0, 1)


def rotary_factor(scaling: AnyRope | None, *, max_length: int) -> float:
    """The factor of cos and sin, and so of rotated queries and keys, of a model with so many positions."""
    if not isinstance(scaling, YarnRope | LongRope):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if isinstance(scaling, YarnRope):
        return 0.1 * math.log(scaling.factor) + 1
    return longrope_factor(scaling.original_length, max_length)


def rotate(
    x_BLHK: jax.Array,
    positions_BL: jax.Array,
    frequencies: jax.Array,
    *,
    factor: float | jax.Array = 1.0,
    interleaved: bool = False,
) -> jax.Array:
    """Apply the rotary position embedding to queries or keys.

    `frequencies` are float32 [R / 2]; the first R of K dims are rotated, the first half of them with the second, or
    each even one with the next (`interleaved`).
    """
    dims = 2 * frequencies.shape[-1]
    if dims < x_BLHK.shape[-1]:
        first = x_BLHK[..., :dims]
        rotated = rotate(first, positions_BL, frequencies, factor=factor, interleaved=interleaved)
        return jnp.concatenate([rotated, x_BLHK[..., dims:]], axis=-1)
    positions_BL1 = positions_BL[..., None].astype(jnp.float32)
    angles = positions_BL1 * aligned(frequencies, positions_BL1)  # [B, L, R / 2]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    if isinstance(factor, jax.Array) or factor != 1:
        cos, sin = cos * factor, sin * factor
    x = x_BLHK.astype(jnp.float32)
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)
        return turned.astype(x_BLHK.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BLHK.dtype)


def model_rotation(
    config: TransformerConfig, local: jax.Array | None, *, length: int
) -> tuple[jax.Array, float | jax.Array]:
    """The frequencies of a layer of a transformer, in radians per position, float32 [R / 2], and its rotary factor."""
    scaling, theta = config.rope_scaling, None if config.local_layers is None else config.local_layers.rope_theta
    frequencies = rotary_frequencies(config.rotary_dims, config.rope_theta, scaling, length=length)
    factor = rotary_factor(scaling, max_length=config.max_sequence_length)
    if local is None or theta is None:
        return frequencies, factor
    own = rotary_frequencies(config.rotary_dims, theta, None)
    return jnp.where(local, own, frequencies), factor if factor == 1 else jnp.where(local, 1.0, factor)
