"""Grouped matmuls by blocks of rows, in plain matmuls and loops: the form for CPU.

The rows of an expert are multiplied part after part with its kernel: first in parts of several blocks, then what is
left of them in blocks, of which the last reaches into the rows of the next expert, whose results are not written. Loops
turn as often as there are filled parts, so that empty experts and unfilled rows cost nothing.

Shapes: R rows, I input and O output features, E experts, T rows of a block, S rows of a part.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxtrain.layout.manual import vary_like

# A product packs the kernel anew, and a sum of products is read and written anew, for every part.
MOST_BLOCKS = 4
# The scope of the loops over whole parts, by which a reader of a program tells them from those over blocks.
PARTS = "parts"


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
    part = blocks_per_part(num_rows, block) * block

    def expert(index: jax.Array, y_RO: jax.Array) -> jax.Array:
        kernel = jax.lax.dynamic_index_in_dim(kernels, index, keepdims=False)
        size, end = group_sizes_E[index], ends_E[index]
        num_parts = size // part
        rest = end - size + num_parts * part

        def product(at: jax.Array, length: int) -> jax.Array:
            return jax.lax.dot_general(jax.lax.dynamic_slice_in_dim(rows_RI, at, length), kernel, contracted)

        def whole(turn: jax.Array, y_RO: jax.Array) -> jax.Array:
            at = end - size + turn * part
            return jax.lax.dynamic_update_slice_in_dim(y_RO, product(at, part), at, 0)

        def step(turn: jax.Array, y_RO: jax.Array) -> jax.Array:
            at, is_own_T = _block_at(rest + turn * block, end, num_rows, block)
            old_TO = jax.lax.dynamic_slice_in_dim(y_RO, at, block)
            y_TO = jnp.where(is_own_T[:, None], product(at, block), old_TO)
            return jax.lax.dynamic_update_slice_in_dim(y_RO, y_TO, at, 0)

        with jax.named_scope(PARTS):
            y_RO = jax.lax.fori_loop(0, num_parts, whole, y_RO)
        return jax.lax.fori_loop(0, _turns(end - rest, block), step, y_RO)

    y_RO = vary_like(jnp.zeros((num_rows, outputs), rows_RI.dtype), rows_RI)
    return jax.lax.fori_loop(0, kernels.shape[0], expert, y_RO)


def block_kernel_gradients(
    rows_RI: jax.Array, gradient_RO: jax.Array, group_sizes_E: jax.Array, *, block: int
) -> jax.Array:
    """Sum row times gradient over the rows of each expert: float32 [E, I, O], the arguments as in `block_products`.

    A product of few rows is as large as one of many, and takes as long to add. So what is left of whole parts is one
    product, of as many blocks as it fills, with which the sum begins.
    """
    num_rows, most = rows_RI.shape[0], blocks_per_part(rows_RI.shape[0], block)
    part = most * block

    def product(x_SI: jax.Array, g_SO: jax.Array) -> jax.Array:
        contracted = (((0,), (0,)), ((), ()))
        return jax.lax.dot_general(x_SI, g_SO, contracted, preferred_element_type=jnp.float32)

    def begin(num_blocks: int, start: jax.Array, end: jax.Array) -> jax.Array:
        """The product of the rows from `start` to `end`, which are at most so many blocks."""
        if num_blocks == 0:
            return vary_like(jnp.zeros((rows_RI.shape[1], gradient_RO.shape[1]), jnp.float32), rows_RI)
        length = num_blocks * block
        at, is_own_S = _block_at(start, end, num_rows, length)
        # Both are masked: the rows of others may hold anything, and 0 times infinity is no number.
        x_SI = jnp.where(is_own_S[:, None], jax.lax.dynamic_slice_in_dim(rows_RI, at, length), 0)
        g_SO = jnp.where(is_own_S[:, None], jax.lax.dynamic_slice_in_dim(gradient_RO, at, length), 0)
        return product(x_SI, g_SO)

    def expert(_: None, group: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        size, end = group
        # At least one row of a group that has any is left.
        num_parts = jnp.maximum(size - 1, 0) // part
        rest = end - size + num_parts * part

        def step(turn: jax.Array, sum_IO: jax.Array) -> jax.Array:
            at = end - size + turn * part
            x_SI = jax.lax.dynamic_slice_in_dim(rows_RI, at, part)
            return sum_IO + product(x_SI, jax.lax.dynamic_slice_in_dim(gradient_RO, at, part))

        forms = [partial(begin, num_blocks) for num_blocks in range(most + 1)]
        sum_IO = jax.lax.switch(_turns(end - rest, block), forms, rest, end)
        with jax.named_scope(PARTS):
            return None, jax.lax.fori_loop(0, num_parts, step, sum_IO)

    return jax.lax.scan(expert, None, (group_sizes_E, jnp.cumsum(group_sizes_E)))[1]


def blocks_per_part(num_rows: int, block: int) -> int:
    """Count the blocks of a part."""
    return min(MOST_BLOCKS, num_rows // block)


def _turns(size: jax.Array, block: int) -> jax.Array:
    return (size + block - 1) // block


def _block_at(start: jax.Array, end: jax.Array, num_rows: int, block: int) -> tuple[jax.Array, jax.Array]:
    """First row of a block that lies within the buffer, and which of its rows are from `start` to `end`."""
    at = jnp.minimum(start, num_rows - block)
    rows_T = at + jnp.arange(block)
    return at, (rows_T >= start) & (rows_T < end)
