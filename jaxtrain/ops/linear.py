"""A linear layer over the last dims of its input.

Shapes: N tokens or rows, D input features, F output features.
"""

import math

import jax
import jax.numpy as jnp

from jaxtrain.sharding import splits_sequence


def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None, *, num_input_dims: int = 1) -> jax.Array:
    """x @ kernel (+ bias), contracting the last `num_input_dims` dims of x with the first ones of the kernel.

    Leading dims are flattened before the product: the transposed products that autodiff makes from a 3-D one miss
    XLA's fast path on CPU (55 against 24.5 ms for one layer's backward, `docs/benchmarks.md`). Where the sequence is
    spread over devices they stay apart, because rows of two spread dims are no contiguous block of one.

    Args:
        x: [..., *D], any float dtype.
        kernel: [*D, *F], the same dtype.
        bias: [*F] or None.
        num_input_dims: how many dims D has.

    Returns:
        [..., *F] in the dtype of x.
    """
    leading, inputs = x.shape[: x.ndim - num_input_dims], kernel.shape[:num_input_dims]
    outputs = kernel.shape[num_input_dims:]
    rows = leading if splits_sequence() else (math.prod(leading),)
    x_ND = x.reshape(*rows, math.prod(inputs))
    kernel_DF = kernel.reshape(math.prod(inputs), math.prod(outputs))
    y_NF = jnp.dot(x_ND, kernel_DF)
    if bias is not None:
        y_NF = y_NF + bias.reshape(-1)
    return y_NF.reshape(*leading, *outputs)
