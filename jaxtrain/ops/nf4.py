"""Matmuls with a kernel of 4-bit normal floats, for inference and for training adapters above it.

Shapes: N rows (one dim or several), I input features, O output features.
"""

from functools import partial

import jax

from jaxtrain.ops.frozen import frozen_matmul
from jaxtrain.precision.nf4 import Nf4Kernel, dequantize


def nf4_matmul(x: jax.Array, kernel: Nf4Kernel) -> jax.Array:
    """Multiply x @ kernel; gradients flow to x.

    The kernel is turned into floats in the dtype of x, one layer at a time, in the forward pass and again in the
    backward pass.

    Args:
        x: [*N, I], any float dtype.
        kernel: of shape [I, O].

    Returns:
        [*N, O] in the dtype of x.
    """
    return frozen_matmul(x, kernel, partial(dequantize, dtype=x.dtype), None)
