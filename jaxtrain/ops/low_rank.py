"""The product of a low-rank adapter, which is added to that of the kernel below it.

Shapes: N rows (one dim or several), I input features, R rank, O output features.
"""

import jax
import jax.numpy as jnp

from jaxtrain.ops.dropout import drop_by_row
from jaxtrain.precision.low_rank import LowRankKernel


def adapter_inputs(x: jax.Array, kernel: LowRankKernel) -> jax.Array:
    """What the adapter of a kernel multiplies: x, some of it dropped where the kernel has a key.

    Args:
        x: [B, ..., *I], any float dtype.
        kernel: of one layer.
    """
    if kernel.key is None or kernel.dropout == 0:
        return x
    return drop_by_row(x, kernel.dropout, kernel.key)


def low_rank_matmul(x: jax.Array, kernel: LowRankKernel) -> jax.Array:
    """Multiply scale * (x @ lora_a) @ lora_b; the product of the factors is never made.

    Args:
        x: [*N, I], from `adapter_inputs`.
        kernel: with factors [I, R] and [R, O] of the dtype of x.

    Returns:
        [*N, O] in the dtype of x.
    """
    return kernel.scale * jnp.dot(jnp.dot(x, kernel.lora_a), kernel.lora_b)
