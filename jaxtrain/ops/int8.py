"""Matmuls with a kernel of 8-bit integers, for inference and for training adapters above it.

Shapes: N rows (one dim or several), I input features, O output features.
"""

import jax
import jax.numpy as jnp

from jaxtrain.ops.frozen import frozen_matmul
from jaxtrain.precision.quantized import QuantizedKernel, round_to_int8

# The sum of more products of two numbers up to 127 may exceed an int32.
_MOST_INPUTS = (2**31 - 1) // 127**2


def int8_matmul(x: jax.Array, kernel: QuantizedKernel) -> jax.Array:
    """Multiply x @ kernel.

    Without `kernel.activations` the integers are converted to the dtype of x, exactly, and the product is summed in
    float32 and scaled; gradients flow to x, and the backward pass converts the integers again. With
    `kernel.activations` each row of x is rounded to int8, scaled by its own largest magnitude, and the integers are
    multiplied and summed exactly (in chunks of 133,144 inputs); this has no gradient.

    Args:
        x: [*N, I], any float dtype.
        kernel: quantized, of shape [I, O].

    Returns:
        [*N, O] in the dtype of x.
    """
    if not kernel.activations:
        dtype = x.dtype
        return frozen_matmul(x, kernel.values, lambda values: values.astype(dtype), kernel.scale)
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    rows, unit = round_to_int8(x, (x.ndim - 1,))

    def product(start: int) -> jax.Array:
        part, values = rows[..., start : start + _MOST_INPUTS], kernel.values[start : start + _MOST_INPUTS]
        return jax.lax.dot_general(part, values, dims, preferred_element_type=jnp.int32).astype(jnp.float32)

    total = sum((product(start) for start in range(_MOST_INPUTS, x.shape[-1], _MOST_INPUTS)), product(0))
    return (total * unit * kernel.scale).astype(x.dtype)
