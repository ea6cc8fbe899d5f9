"""Weights as 8-bit integers with one scale per output channel, for inference and for frozen parameters.

Dims of shapes: D input features, F output features; `*stack` are the dims that count layers or experts.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

# -128 is left out, so that the integers are symmetric about 0.
_LARGEST = 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedKernel:
    """A quantized kernel of a linear layer, which takes the place of the float array in the parameters.

    Attributes:
        values: int8 [*stack, *D, *F], input features before output features.
        scale: float32 [*stack, *F]; the kernel is `values * scale`.
        activations: Whether the layer's input is rounded to int8 too, with one scale per row, for an integer matmul.
    """

    values: jax.Array
    scale: jax.Array
    activations: bool = field(default=False, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel, [*stack, *D, *F]."""
        return self.values.shape

    def reshape(self, num_inputs: int, num_outputs: int) -> "QuantizedKernel":
        """Returns a kernel without stack dims as a matrix [D, F].

        Args:
            num_inputs: D, the product of the input dims.
            num_outputs: F, the product of the output dims.
        """
        return QuantizedKernel(
            self.values.reshape(num_inputs, num_outputs), self.scale.reshape(num_outputs), self.activations
        )


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


def quantize_kernel(
    kernel: jax.Array, num_input_dims: int, num_output_dims: int, *, activations: bool
) -> QuantizedKernel:
    """Quantizes a kernel with one scale per output channel, separately for each layer of a stack.

    Args:
        kernel: [*stack, *D, *F], of any float dtype.
        num_input_dims: Number of dims in `*D`.
        num_output_dims: Number of dims in `*F`.
        activations: Whether the layer rounds its input to int8 too.
    """
    first = kernel.ndim - num_output_dims - num_input_dims
    inputs = tuple(range(first, first + num_input_dims))
    values, scale = round_to_int8(kernel, inputs)
    return QuantizedKernel(values, jnp.squeeze(scale, inputs), activations)
