"""Layers of the shipped models as NNX modules; they compute in the dtype of their input.

Shapes: B batch, L length, H heads, K head_dim.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.arguments import refusal
from jaxtrain.errors import ConfigError
from jaxtrain.models.initializers import Initializer
from jaxtrain.ops.elementwise import aligned, drop_by_row
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
        offset: whether the parameter is the scale less 1.
    """

    def __init__(self, dim: int, *, kind: str, bias: bool, epsilon: float, offset: bool = False):
        self.scale = nnx.Param(jnp.zeros((dim,), jnp.float32) if offset else jnp.ones((dim,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((dim,), jnp.float32)) if bias and kind == "layernorm" else None
        self.kind, self.epsilon, self.offset = kind, epsilon, offset

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.kind == "layernorm":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
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
    return drop_by_row(x, rate, key)
