"""Matmuls with a kernel of 8-bit integers, for inference.

Shapes: N rows (one dim or several), D input features, F output features.
"""

import jax
import jax.numpy as jnp

from jaxtrain.quantized import QuantizedKernel, round_to_int8


def int8_matmul(x: jax.Array, kernel: QuantizedKernel) -> jax.Array:
    """x @ kernel.

    Without `kernel.activations` the integers are raised to the dtype of x, exactly, and the product is summed in
    float32 and scaled; gradients flow to x. With it each row of x is rounded to int8 by its own largest magnitude, and
    integers are multiplied and summed as integers, exactly; it has no gradient.

    Args:
        x: [*N, D], any float dtype.
        kernel: of [D, F].

    Returns:
        [*N, F] in the dtype of x.
    """
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    if not kernel.activations:
        y = jax.lax.dot_general(x, kernel.values.astype(x.dtype), dims, preferred_element_type=jnp.float32)
        return (y * kernel.scale).astype(x.dtype)
    rows, unit = round_to_int8(x, (x.ndim - 1,))
    total = jax.lax.dot_general(rows, kernel.values, dims, preferred_element_type=jnp.int32)
    return (total.astype(jnp.float32) * unit * kernel.scale).astype(x.dtype)
