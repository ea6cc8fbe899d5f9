"""Grouped matmuls by blocks of rows, in plain matmuls and loops: the form for CPU.

The rows of an expert are multiplied block after block with its kernel, and its last block reaches into the rows of the
next expert, whose results are not written. Loops turn as often as there are filled blocks, so that empty experts and
unfilled rows cost nothing.

Shapes: R rows, I input and O output features, E experts, T rows of a block.
"""

import jax
import jax.numpy as jnp

from jaxtrain.layout.manual import vary_like


def block_products(
    rows_RI: jax.Array, kernels: jax.Array, group_sizes_E: jax.Array, *, block: int, transposed: bool = False
) -> jax.Array:
    """Multiply each row with the kernel of its expert.

    Args:
        rows_RI: sorted by expert.
        kernels: [E, I, O], or [E, O, I] if `transposed`.
        group_sizes_E: int32, rows of each expert; the sum may be below R.
        block: T, at most R.
        transposed: whether kernels are contracted over their last dim.

    Returns:
        [R, O] in the dtype of the rows; rows beyond the groups are 0.
    """
    num_rows, outputs = rows_RI.shape[0], kernels.shape[1 if transposed else 2]
    ends_E = jnp.cumsum(group_sizes_E)
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def expert(index: jax.Array, y_RO: jax.Array) -> jax.Array:
        kernel = jax.lax.dynamic_index_in_dim(kernels, index, keepdims=False)
        size, end = group_sizes_E[index], ends_E[index]

        def step(turn: jax.Array, y_RO: jax.Array) -> jax.Array:
            at, is_own_T = _block_at(end - size + turn * block, end, num_rows, block)
            x_TI = jax.lax.dynamic_slice_in_dim(rows_RI, at, block)
            y_TO = jax.lax.dot_general(x_TI, kernel, contracted)
            old_TO = jax.lax.dynamic_slice_in_dim(y_RO, at, block)
            return jax.lax.dynamic_update_slice_in_dim(y_RO, jnp.where(is_own_T[:, None], y_TO, old_TO), at, 0)

        return jax.lax.fori_loop(0, _turns(size, block), step, y_RO)

    y_RO = vary_like(jnp.zeros((num_rows, outputs), rows_RI.dtype), rows_RI)
    return jax.lax.fori_loop(0, kernels.shape[0], expert, y_RO)


def block_kernel_gradients(
    rows_RI: jax.Array, gradient_RO: jax.Array, group_sizes_E: jax.Array, *, block: int
) -> jax.Array:
    """Sum row times gradient over the rows of each expert: float32 [E, I, O], the arguments as in `block_products`."""
    num_rows = rows_RI.shape[0]

    def expert(_: None, group: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        size, end = group

        def step(turn: jax.Array, sum_IO: jax.Array) -> jax.Array:
            at, is_own_T = _block_at(end - size + turn * block, end, num_rows, block)
            x_TI = jax.lax.dynamic_slice_in_dim(rows_RI, at, block)
            # Both are masked: the rows of others may hold anything, and 0 times infinity is no number.
            x_TI = jnp.where(is_own_T[:, None], x_TI, 0)
            g_TO = jnp.where(is_own_T[:, None], jax.lax.dynamic_slice_in_dim(gradient_RO, at, block), 0)
            contracted = (((0,), (0,)), ((), ()))
            return sum_IO + jax.lax.dot_general(x_TI, g_TO, contracted, preferred_element_type=jnp.float32)

        zeros_IO = vary_like(jnp.zeros((rows_RI.shape[1], gradient_RO.shape[1]), jnp.float32), rows_RI)
        return None, jax.lax.fori_loop(0, _turns(size, block), step, zeros_IO)

    return jax.lax.scan(expert, None, (group_sizes_E, jnp.cumsum(group_sizes_E)))[1]


def _turns(size: jax.Array, block: int) -> jax.Array:
    return (size + block - 1) // block


def _block_at(start: jax.Array, end: jax.Array, num_rows: int, block: int) -> tuple[jax.Array, jax.Array]:
    """First row of a block that lies within the buffer, and which of its rows are from `start` to `end`."""
    at = jnp.minimum(start, num_rows - block)
    rows_T = at + jnp.arange(block)
    return at, (rows_T >= start) & (rows_T < end)
