"""Weights as 8-bit integers: one scale an output channel, for inference and for frozen parameters."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

_LARGEST = 127  # symmetric: -128 is left out


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedKernel:
    """A kernel of a linear layer, in place of the array.

    Attributes:
        values: int8 [*stack, *D, *F], input features before output features.
        scale: float32 [*stack, *F]; the kernel is `values * scale`.
        activations: whether the layer's input is rounded to int8 too, a scale a row ("dynamic"), for an integer matmul.
    """

    values: jax.Array
    scale: jax.Array
    activations: bool = field(default=False, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the kernel."""
        return self.values.shape

    def reshape(self, num_inputs: int, num_outputs: int) -> "QuantizedKernel":
        """As a matrix [D, F]."""
        return QuantizedKernel(
            self.values.reshape(num_inputs, num_outputs), self.scale.reshape(num_outputs), self.activations
        )


def round_to_int8(x: jax.Array, dims: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Integers from -127 to 127 and their scale, which is one over these dims.

    Args:
        x: of any float dtype.
        dims: that share a scale; they stay, with size 1.

    Returns:
        int8 in the shape of x, and float32: their product is x within half a scale.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=dims, keepdims=True)
    # All zeros have any scale; an infinity keeps its own, so that it shows.
    scale = jnp.where(largest == 0, 1, largest / _LARGEST)
    return jnp.round(x / scale).astype(jnp.int8), scale


def quantize_kernel(
    kernel: jax.Array, num_input_dims: int, num_output_dims: int, *, activations: bool
) -> QuantizedKernel:
    """A kernel [*stack, *D, *F] with one scale an output channel (and layer of the stack)."""
    first = kernel.ndim - num_output_dims - num_input_dims
    inputs = tuple(range(first, first + num_input_dims))
    values, scale = round_to_int8(kernel, inputs)
    return QuantizedKernel(values, jnp.squeeze(scale, inputs), activations)
