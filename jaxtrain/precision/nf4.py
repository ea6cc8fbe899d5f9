"""Weights as 4-bit normal floats with one scale per 64 inputs, for frozen parameters and for inference.

Dims of shapes: D input features (I, where several dims are flattened), F output features, B = ceil(I / 64) blocks per
output; `*stack` are the dims that count layers. The format, and what it is equal to, is that of
`jaxtrain.formats.nf4`, whose rows are our columns.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxtrain.errors import ConfigError
from jaxtrain.formats.nf4 import (
    BLOCK,
    LEVELS,
    NESTED_BLOCK,
    SMALLEST,
    dynamic_bounds,
    dynamic_map,
    level_bounds,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Nf4Kernel:
    """A kernel of a linear layer in 4 bits, which takes the place of the float array in the parameters.

    Attributes:
        codes: uint8 [*stack, I / 2, *F]; the first of two inputs is in the high half of a byte.
        absmax: scales of the blocks [*stack, B, *F]: float32, or uint8 codes with double quantization.
        nested_absmax: float32 [*stack, ceil(B F / 256)], the scales of the scales, whose blocks count the blocks of
            the first output, then of the second and so on; None without double quantization.
        offset: float32 [*stack], the mean of the scales; None without double quantization.
        inputs: *D, sizes of the input dims.
        num_output_dims: number of dims in *F.
    """

    codes: jax.Array
    absmax: jax.Array
    nested_absmax: jax.Array | None = None
    offset: jax.Array | None = None
    inputs: tuple[int, ...] = field(default=(), metadata=dict(static=True))
    num_output_dims: int = field(default=1, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel, [*stack, *D, *F]."""
        place = self.codes.ndim - self.num_output_dims - 1
        return (*self.codes.shape[:place], *self.inputs, *self.codes.shape[place + 1 :])

    def reshape(self, num_inputs: int, num_outputs: int) -> "Nf4Kernel":
        """Returns a kernel without stack dims as a matrix [D, F]."""
        codes, absmax = self.codes.reshape(-1, num_outputs), self.absmax.reshape(-1, num_outputs)
        return Nf4Kernel(codes, absmax, self.nested_absmax, self.offset, (num_inputs,), 1)


def quantize_nf4(kernel: jax.Array, num_input_dims: int, num_output_dims: int, *, double: bool = True) -> Nf4Kernel:
    """Quantizes a kernel in blocks of 64 inputs of one output, separately for each layer of a stack.

    The result is the same on every mesh.

    Args:
        kernel: [*stack, *D, *F], of any float dtype.
        num_input_dims, num_output_dims: Numbers of dims in `*D` and `*F`.
        double: Whether the scales of the blocks are stored in 8 bits (4.127 bits per weight instead of 4.5).

    Raises:
        ConfigError: I is odd.
    """
    first = kernel.ndim - num_output_dims - num_input_dims
    stack, inputs = kernel.shape[:first], kernel.shape[first : first + num_input_dims]
    outputs = kernel.shape[first + num_input_dims :]
    num_inputs, num_outputs = math.prod(inputs), math.prod(outputs)
    if num_inputs % 2:
        raise ConfigError(
            f"nf4 stores two weights per byte, and a kernel {list(kernel.shape)} has {num_inputs} inputs, an odd "
            "number; use int8, or a model with an even width"
        )
    blocks = -(-num_inputs // BLOCK)
    x = kernel.reshape(*stack, num_inputs, *outputs).astype(jnp.float32)
    padding = [(0, 0)] * len(stack) + [(0, blocks * BLOCK - num_inputs)] + [(0, 0)] * len(outputs)
    x = jnp.pad(x, padding).reshape(*stack, blocks, BLOCK, *outputs)
    absmax = jnp.max(jnp.abs(x), axis=first + 1)
    x = x * jnp.expand_dims(_inverse(absmax), first + 1)
    codes = sum((x > bound for bound in level_bounds()), jnp.zeros(x.shape, jnp.uint8))
    codes = jax.lax.slice_in_dim(codes.reshape(*stack, blocks * BLOCK, *outputs), 0, num_inputs, axis=first)
    codes = codes.reshape(*stack, num_inputs // 2, 2, *outputs)
    high, low = (jax.lax.index_in_dim(codes, half, first + 1, keepdims=False) for half in (0, 1))
    packed = high << 4 | low
    if not double:
        return Nf4Kernel(packed, absmax, inputs=inputs, num_output_dims=num_output_dims)
    # In the order of the rows of a weight [outputs, inputs].
    flat = absmax.reshape(*stack, blocks, num_outputs).swapaxes(-1, -2).reshape(*stack, -1)
    small, nested_absmax, offset = quantize_magnitudes(flat)
    small = small.reshape(*stack, num_outputs, blocks).swapaxes(-1, -2).reshape(absmax.shape)
    return Nf4Kernel(packed, small, nested_absmax, offset, inputs, num_output_dims)


def _inverse(scales: jax.Array) -> jax.Array:
    """1 / scale; 1 for a scale that counts as 0."""
    return 1 / jnp.where(scales < SMALLEST, 1, scales)


def quantize_magnitudes(absmax: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Double quantization of magnitudes, float32 [*stack, n], of the rows of a weight, one after the other.

    Returns:
        Codes uint8 [*stack, n], nested magnitudes [*stack, ceil(n / 256)] and offset [*stack].
    """
    stack, count = absmax.shape[:-1], absmax.shape[-1]
    offset = _mean_magnitude(absmax)
    blocks = -(-count // NESTED_BLOCK)
    x = absmax - offset[..., None]
    x = jnp.pad(x, [(0, 0)] * len(stack) + [(0, blocks * NESTED_BLOCK - count)])
    x = x.reshape(*stack, blocks, NESTED_BLOCK)
    nested = jnp.max(jnp.abs(x), axis=-1)
    x = x * _inverse(nested)[..., None]
    codes = jnp.searchsorted(jnp.asarray(dynamic_bounds()), x, side="right", method="compare_all").astype(jnp.uint8)
    codes = jnp.where(nested[..., None] < SMALLEST, 0, codes).astype(jnp.uint8)
    return codes.reshape(*stack, -1)[..., :count], nested, offset


def _mean_magnitude(absmax: jax.Array) -> jax.Array:
    """The mean of float32 [*stack, n], of the first 32 bits below the largest one: the same in every order of sums."""
    count, largest = absmax.shape[-1], jnp.max(absmax, axis=-1)
    bits = jax.lax.bitcast_convert_type(absmax, jnp.uint32)
    exponent = bits >> 23
    top = jnp.max(exponent, axis=-1)
    mantissa = jnp.where(exponent > 0, (bits & 0x7FFFFF | 0x800000) << 8, 0)
    down = top[..., None] - exponent
    fixed = jnp.where(down < 32, mantissa >> jnp.minimum(down, 31), 0)
    # The sum has 56 bits: it is held as bytes, the lowest first, and divided as on paper.
    sums = [jnp.sum(fixed >> (8 * place) & 0xFF, axis=-1, dtype=jnp.uint32) for place in range(4)]
    total, carry = [], jnp.zeros_like(top)
    for place in range(7):
        carry = carry + sums[place] if place < 4 else carry
        total.append(carry & 0xFF)
        carry = carry >> 8
    quotient, rest = jnp.zeros_like(top), jnp.zeros_like(top)
    for byte in reversed(total):
        rest = rest << 8 | byte
        quotient = quotient << 8 | rest // count
        rest = rest % count
    unit = jax.lax.bitcast_convert_type(jnp.maximum(top, 32) - 31 << 23, jnp.float32)
    mean = jnp.where(largest < SMALLEST, 0, quotient.astype(jnp.float32) * unit)
    return jnp.where(jnp.isfinite(largest), mean, jnp.nan)


def dequantize(kernel: Nf4Kernel, dtype: DTypeLike) -> jax.Array:
    """Returns the float array [*stack, *D, *F] that a kernel stands for, computed in float32 and rounded to `dtype`."""
    first = kernel.codes.ndim - kernel.num_output_dims - 1
    num_inputs = math.prod(kernel.inputs)
    levels = _levels(kernel.codes, first)
    # In the shape of the kernel and not of blocks, so that a mesh may shard inputs where it cannot shard blocks.
    scales = jnp.repeat(_magnitudes(kernel, first), BLOCK, axis=first)
    scales = jax.lax.slice_in_dim(scales, 0, num_inputs, axis=first)
    return (levels * scales).astype(dtype).reshape(kernel.shape)


def _levels(codes: jax.Array, dim: int) -> jax.Array:
    """The level of each code: uint8 [..., I / 2, ...] -> float32 [..., I, ...] along `dim`."""
    both = jnp.stack([codes >> 4, codes & 15], axis=dim + 1)
    both = both.reshape(*codes.shape[:dim], 2 * codes.shape[dim], *codes.shape[dim + 1 :])
    return jnp.asarray(LEVELS, jnp.float32).at[both].get(mode="promise_in_bounds")


def _magnitudes(kernel: Nf4Kernel, first: int) -> jax.Array:
    """float32 [*stack, B, *F]: the scales, whichever way they are stored."""
    if kernel.nested_absmax is None or kernel.offset is None:
        return kernel.absmax
    absmax, stack = kernel.absmax, kernel.absmax.shape[:first]
    blocks, num_outputs = absmax.shape[first], math.prod(absmax.shape[first + 1 :])
    # Number of the block of blocks that each block is in: blocks are counted output by output.
    counted = jnp.arange(num_outputs) * blocks + jnp.arange(blocks)[:, None]
    nested = jnp.take(kernel.nested_absmax, counted // NESTED_BLOCK, axis=-1)
    nested = nested.reshape(absmax.shape)
    offset = kernel.offset.reshape(*stack, *[1] * (absmax.ndim - first))
    values = jnp.asarray(dynamic_map()).at[absmax.astype(jnp.int32)].get(mode="promise_in_bounds")
    return values * nested + offset
