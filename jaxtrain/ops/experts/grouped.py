"""Grouped matmul: rows sorted by expert, each times the kernel of its expert, in the form of the platform.

Shapes: R rows, I input and O output features, E experts.
"""

from functools import partial

import jax

from jaxtrain.layout.manual import vary_alike
from jaxtrain.layout.sharding import platform
from jaxtrain.ops.experts.blocks import block_kernel_gradients, block_products
from jaxtrain.ops.experts.rows import block_rows


def grouped_matmul(rows_RI: jax.Array, kernels_EIO: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """Multiply each row with the kernel of its expert.

    TPU has kernels behind `jax.lax.ragged_dot`. Elsewhere that multiplies every row with every kernel and masks (jax
    0.10.2, CPU and compiled for H100), so that rows are multiplied by blocks.

    Args:
        rows_RI: sorted by expert.
        kernels_EIO: in the dtype of the rows.
        group_sizes_E: int32, rows of each expert; the sum may be below R.

    Returns:
        [R, O] in the dtype of the rows. Rows beyond the groups may hold anything, and so may their gradients.
    """
    where = platform()
    if where == "tpu":
        return jax.lax.ragged_dot(rows_RI, kernels_EIO, group_sizes_E)
    block = min(block_rows("cpu", rows_RI.shape[0], kernels_EIO.shape[0]), rows_RI.shape[0])
    return _by_blocks(block, *vary_alike(rows_RI, kernels_EIO, group_sizes_E))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_blocks(block: int, rows_RI: jax.Array, kernels_EIO: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    return block_products(rows_RI, kernels_EIO, group_sizes_E, block=block)


def _by_blocks_forward(
    block: int, rows_RI: jax.Array, kernels_EIO: jax.Array, group_sizes_E: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    y_RO = block_products(rows_RI, kernels_EIO, group_sizes_E, block=block)
    return y_RO, (rows_RI, kernels_EIO, group_sizes_E)


def _by_blocks_backward(
    block: int, saved: tuple[jax.Array, jax.Array, jax.Array], gradient_RO: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows_RI, kernels_EIO, group_sizes_E = saved
    rows_gradient = block_products(gradient_RO, kernels_EIO, group_sizes_E, block=block, transposed=True)
    kernels_gradient = block_kernel_gradients(rows_RI, gradient_RO, group_sizes_E, block=block)
    return rows_gradient, kernels_gradient.astype(kernels_EIO.dtype), None


_by_blocks.defvjp(_by_blocks_forward, _by_blocks_backward)
