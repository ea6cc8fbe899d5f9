"""What may stand in the place of the float array of a linear layer's kernel: each kind is the type of one leaf.

Weights as 8-bit integers with one scale per output channel, for inference and for frozen parameters; as 4-bit normal
floats (`nf4.py`); and a kernel with a low-rank adapter (Hu et al. 2021, arXiv 2106.09685).

Dims of shapes: D input features, F output features, R rank; `*stack` are the dims that count layers or experts.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.precision.nf4 import Nf4Kernel

# -128 is left out, so that the integers are symmetric about 0.
_LARGEST = 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedKernel:
    """A quantized kernel of a linear layer, which takes the place of the float array in the parameters.

    Attributes:
        values: int8 [*stack, *D, *F], input features before output features.
        scale: float32 [*stack, *F]; the kernel is `values * scale`.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel, [*stack, *D, *F]."""
        return self.values.shape

    def reshape(self, num_inputs: int, num_outputs: int) -> "QuantizedKernel":
        """Returns a kernel without stack dims as a matrix [D, F]."""
        return QuantizedKernel(self.values.reshape(num_inputs, num_outputs), self.scale.reshape(num_outputs))


def round_to_int8(x: jax.Array, dims: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Rounds an array to integers from -127 to 127.

    Args:
        x: Array of any float dtype.
        dims: Dims over which all numbers share one scale.

    Returns:
        The integers, int8 in the shape of `x`, and the scales, float32 in that shape with size 1 in `dims`. Their
        product differs from `x` by at most half a scale.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=dims, keepdims=True)
    # Zeros fit any scale. An infinity makes its scale infinite, so that it is not hidden.
    scale = jnp.where(largest == 0, 1, largest / _LARGEST)
    return jnp.round(x / scale).astype(jnp.int8), scale


def quantize_kernel(kernel: jax.Array, num_input_dims: int, num_output_dims: int) -> QuantizedKernel:
    """Quantizes a kernel with one scale per output channel, separately for each layer of a stack.

    Args:
        kernel: [*stack, *D, *F], of any float dtype.
        num_input_dims, num_output_dims: Numbers of dims in `*D` and `*F`.
    """
    first = kernel.ndim - num_output_dims - num_input_dims
    inputs = tuple(range(first, first + num_input_dims))
    values, scale = round_to_int8(kernel, inputs)
    return QuantizedKernel(values, jnp.squeeze(scale, inputs))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankKernel:
    """The kernel `base + scale * lora_a @ lora_b`, which takes the place of the float array in the parameters.

    Attributes:
        base: the frozen kernel [*stack, *D, *F]: a float array, or a quantized kernel.
        lora_a: float [*stack, *D, R].
        lora_b: float [*stack, R, *F].
        scale: what the product is multiplied by.
        dropout: share of the adapter's inputs that become 0 in training.
        key: random key [*stack] of the masks, which a model puts in while it trains; None: nothing is dropped.
    """

    base: Any
    lora_a: jax.Array
    lora_b: jax.Array
    scale: float = field(default=1.0, metadata=dict(static=True))
    dropout: float = field(default=0.0, metadata=dict(static=True))
    key: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel, [*stack, *D, *F]."""
        return self.base.shape

    @property
    def rank(self) -> int:
        """R, the columns of `lora_a`."""
        return self.lora_a.shape[-1]

    def reshape(self, num_inputs: int, num_outputs: int) -> "LowRankKernel":
        """Returns a kernel without stack dims as a matrix [D, F]."""
        base = self.base.reshape(num_inputs, num_outputs)
        lora_a, lora_b = self.lora_a.reshape(num_inputs, self.rank), self.lora_b.reshape(self.rank, num_outputs)
        return LowRankKernel(base, lora_a, lora_b, self.scale, self.dropout, self.key)


QUANTIZED = (QuantizedKernel, Nf4Kernel)
"""Kinds of kernels in fewer bits: their scales are part of their values, and nothing casts or trains them."""


def is_quantized(leaf: Any) -> bool:
    """Whether a leaf of the parameters is a quantized kernel."""
    return isinstance(leaf, QUANTIZED)


def is_kernel(leaf: Any) -> bool:
    """Whether a leaf of the parameters is a kernel that is no float array: what `is_leaf` of tree functions takes."""
    return isinstance(leaf, (LowRankKernel, *QUANTIZED))
