"""Grouped matmul: rows sorted by expert, each times the kernel of its expert, in the form of the platform.

For CPU the rows of an expert are multiplied part after part with its kernel, in parts of several blocks. What is left
of whole parts is one product, of as many blocks as it fills, of which the last reaches into the rows of the next
expert, whose results are not written. Empty experts and unfilled rows cost nothing. Each number of blocks has a loop of
one turn or none: where a branch writes into a buffer, XLA on CPU copies the whole buffer (jax 0.10.2).

For NVIDIA they are Triton kernels, through Pallas. A program multiplies one tile of the result. Tiles of rows belong to
one expert each; the last tile of an expert reaches into the rows of the next one, which it neither reads nor writes.
Tiles beyond the filled rows end at once.

Shapes: R rows, I input and O output features, E experts, T rows of a block or tile, S rows of a part, M tiles.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from jaxtrain.layout.manual import manual_type, vary_alike, vary_like
from jaxtrain.layout.sharding import platform
from jaxtrain.ops.experts.rows import block_rows

State = TypeVar("State")

# A product packs the kernel anew, and a sum of products is read and written anew, for every part: not worth four more
# loops where kernels have at most so many numbers, which take as long by single blocks and compile in half the time.
_MOST_BLOCKS, _SMALL_KERNEL = 4, 2**13
# Scopes of the loops over whole parts, and of those over what is left, with its number of blocks: a reader of a program
# tells by them how often a loop turns.
PARTS, REST = "parts", "rest_of_blocks_"
# Rows and columns of a tile of the result. With chunks of the summed dim of 128 bytes, three of which are on their way,
# both operands take 96 KB of the 227 KB of a multiprocessor of H100.
TILE = 128
_CHUNK_BYTES = 128
_WARPS, _STAGES = 8, 3
# Tiles of rows whose programs are neighbours: they share the columns of a kernel in the cache.
_NEIGHBOURS = 8


def grouped_matmul(rows_RI: Array, kernels_EIO: Array, group_sizes_E: Array) -> Array:
    """Multiply each row [R, I], sorted by expert, with the kernel of its expert: [R, O] in the dtype of both.

    TPU has kernels behind `jax.lax.ragged_dot`. Elsewhere that multiplies every row with every kernel and masks (jax
    0.10.2, CPU and compiled for H100), so that rows are multiplied by blocks. The sum of the int32 group sizes may be
    below R; rows beyond the groups may hold anything, and so may their gradients.
    """
    where = platform()
    if where == "tpu":
        return jax.lax.ragged_dot(rows_RI, kernels_EIO, group_sizes_E)
    by_tiles = where == "gpu" and takes_tiles(rows_RI.shape[0], *kernels_EIO.shape[1:])
    return multiply_groups(TILED if by_tiles else BLOCKED, rows_RI, kernels_EIO, group_sizes_E)


@dataclass(frozen=True)
class Form:
    """A way to multiply groups of rows.

    Attributes:
        products: (rows [R, I], kernels [E, I, O], group sizes) -> [R, O].
        gradients: (rows [R, I], kernels, gradients [R, O], group sizes) -> gradients of the rows [R, I], and of the
            kernels, float32 [E, I, O].
    """

    products: Callable[[Array, Array, Array], Array]
    gradients: Callable[[Array, Array, Array, Array], tuple[Array, Array]]


def _block(rows: Array, group_sizes_E: Array) -> int:
    return block_rows("cpu", rows.shape[0], group_sizes_E.size)


def tiled(*, interpret: bool = False) -> Form:
    """The form of the kernels for NVIDIA; with `interpret` as plain operations on any platform, for tests."""

    def gradients(rows: Array, kernels: Array, gradient: Array, sizes: Array) -> tuple[Array, Array]:
        of_rows = tile_products(gradient, kernels, sizes, transposed=True, interpret=interpret)
        return of_rows, tile_kernel_gradients(rows, gradient, sizes, interpret=interpret)

    return Form(partial(tile_products, interpret=interpret), gradients)


# --- Blocks of rows, in plain matmuls and loops. ---


def block_products(rows_RI: Array, kernels_EIO: Array, group_sizes_E: Array, *, block: int) -> Array:
    """Compute `grouped_matmul` in blocks of at most R rows."""
    num_rows, outputs = rows_RI.shape[0], kernels_EIO.shape[2]
    ends_E = jnp.cumsum(group_sizes_E)
    most = blocks_per_part(num_rows, block, kernels_EIO.shape)
    part = most * block

    def expert(index: Array, y_RO: Array) -> Array:
        kernel = jax.lax.dynamic_index_in_dim(kernels_EIO, index, keepdims=False)
        size, end = group_sizes_E[index], ends_E[index]
        num_parts, rest = _parts_and_rest(size, end, part)

        def whole(turn: Array, y_RO: Array) -> Array:
            at = end - size + turn * part
            y_SO = _product(jax.lax.dynamic_slice_in_dim(rows_RI, at, part), kernel)
            return jax.lax.dynamic_update_slice_in_dim(y_RO, y_SO, at, 0)

        def last(num_blocks: int, turn: Array, y_RO: Array) -> Array:
            length = num_blocks * block
            at, is_own_S = _block_at(rest + turn * length, end, num_rows, length)
            y_SO = _product(jax.lax.dynamic_slice_in_dim(rows_RI, at, length), kernel)
            return _write(y_RO, y_SO, at, is_own_S)

        with jax.named_scope(PARTS):
            y_RO = jax.lax.fori_loop(0, num_parts, whole, y_RO)
        return _choose_blocks(_turns(end - rest, block), most, last, y_RO)

    y_RO = _unwritten(kernels_EIO, num_rows, outputs)
    return jax.lax.fori_loop(0, kernels_EIO.shape[0], expert, y_RO)


def block_gradients(
    rows_RI: Array, kernels_EIO: Array, gradient_RO: Array, group_sizes_E: Array, *, block: int
) -> tuple[Array, Array]:
    """Compute the gradients of `block_products`, in one pass over the gradient's rows.

    Those of the rows are in the dtype of the gradient, anything in rows beyond the groups; those of the kernels are
    float32 [E, I, O], the sum of row times gradient over the rows of each expert.
    """
    num_rows, most = rows_RI.shape[0], blocks_per_part(rows_RI.shape[0], block, kernels_EIO.shape)
    part = most * block

    def summed(x_SI: Array, g_SO: Array) -> Array:
        contracted = (((0,), (0,)), ((), ()))
        return jax.lax.dot_general(x_SI, g_SO, contracted, preferred_element_type=jnp.float32)

    def expert(x_gradient_RI: Array, group: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        kernel, size, end = group
        num_parts, rest = _parts_and_rest(size, end, part)

        def begin(num_blocks: int, turn: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            """The rows that are left of whole parts, with which the sum begins."""
            x_gradient_RI, _ = state
            length = num_blocks * block
            at, is_own_S = _block_at(rest + turn * length, end, num_rows, length)
            # Both are masked: the rows of others may hold anything, and 0 times infinity is no number.
            x_SI = jnp.where(is_own_S[:, None], jax.lax.dynamic_slice_in_dim(rows_RI, at, length), 0)
            g_SO = jnp.where(is_own_S[:, None], jax.lax.dynamic_slice_in_dim(gradient_RO, at, length), 0)
            return _write(x_gradient_RI, _product(g_SO, kernel, transposed=True), at, is_own_S), summed(x_SI, g_SO)

        def step(turn: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            x_gradient_RI, sum_IO = state
            at = end - size + turn * part
            x_SI = jax.lax.dynamic_slice_in_dim(rows_RI, at, part)
            g_SO = jax.lax.dynamic_slice_in_dim(gradient_RO, at, part)
            x_gradient_SI = _product(g_SO, kernel, transposed=True)
            x_gradient_RI = jax.lax.dynamic_update_slice_in_dim(x_gradient_RI, x_gradient_SI, at, 0)
            return x_gradient_RI, sum_IO + summed(x_SI, g_SO)

        zeros_IO = vary_like(jnp.zeros((rows_RI.shape[1], gradient_RO.shape[1]), jnp.float32), rows_RI)
        state = _choose_blocks(_turns(end - rest, block), most, begin, (x_gradient_RI, zeros_IO))
        with jax.named_scope(PARTS):
            return jax.lax.fori_loop(0, num_parts, step, state)

    x_gradient_RI = _unwritten(gradient_RO, *rows_RI.shape)
    return jax.lax.scan(expert, x_gradient_RI, (kernels_EIO, group_sizes_E, jnp.cumsum(group_sizes_E)))


def blocks_per_part(num_rows: int, block: int, kernels: tuple[int, ...]) -> int:
    """Count the blocks of a part, for kernels of a shape [E, I, O]."""
    return 1 if math.prod(kernels[1:]) <= _SMALL_KERNEL else min(_MOST_BLOCKS, num_rows // block)


def _parts_and_rest(size: Array, end: Array, part: int) -> tuple[Array, Array]:
    """Count the whole parts of a group, and find its first row after them: of a group that has rows, one is left."""
    num_parts = jnp.maximum(size - 1, 0) // part
    return num_parts, end - size + num_parts * part


def _unwritten(given: Array, num_rows: int, width: int) -> Array:
    """Make a buffer of some number of the given array: zeros of several loops XLA would share, and copy for each."""
    return jnp.broadcast_to(given[(0,) * given.ndim], (num_rows, width))


def _choose_blocks(num_blocks: Array, most: int, form: Callable[[int, Array, State], State], state: State) -> State:
    """Apply the form of so many blocks to the state; it must read its turn, 0, or XLA computes it before the loop."""
    for number in range(1, most + 1):
        with jax.named_scope(f"{REST}{number}"):
            turns = (num_blocks == number).astype(jnp.int32)
            state = jax.lax.fori_loop(0, turns, partial(form, number), state)
    return state


def _product(rows: Array, kernel: Array, *, transposed: bool = False) -> Array:
    return jax.lax.dot_general(rows, kernel, (((1,), (1 if transposed else 0,)), ((), ())))


def _write(y_RO: Array, y_SO: Array, at: Array, is_own_S: Array) -> Array:
    """Write the own rows of results that begin at a row of the buffer."""
    old_SO = jax.lax.dynamic_slice_in_dim(y_RO, at, y_SO.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(y_RO, jnp.where(is_own_S[:, None], y_SO, old_SO), at, 0)


def _turns(size: Array, block: int) -> Array:
    return (size + block - 1) // block


def _block_at(start: Array, end: Array, num_rows: int, block: int) -> tuple[Array, Array]:
    """First row of a block that lies within the buffer, and which of its rows are from `start` to `end`."""
    at = jnp.minimum(start, num_rows - block)
    rows_T = at + jnp.arange(block)
    return at, (rows_T >= start) & (rows_T < end)


# --- Tiles, as Triton kernels. ---


def takes_tiles(num_rows: int, inputs: int, outputs: int) -> bool:
    """Whether these kernels can multiply such sizes."""
    return num_rows >= TILE and inputs % TILE == 0 and outputs % TILE == 0


def num_tiles(num_rows: int, num_experts: int) -> int:
    """Count the tiles of rows that any group sizes need at most, in whole groups of neighbours."""
    most = num_rows // TILE + num_experts
    return -(-most // _NEIGHBOURS) * _NEIGHBOURS


def tile_products(
    rows_RI: Array, kernels: Array, group_sizes_E: Array, *, transposed: bool = False, interpret: bool = False
) -> Array:
    """Multiply each row with the kernel [E, I, O] of its expert, or [E, O, I] if `transposed`, as `grouped_matmul`.

    With `interpret` the kernel's steps run as plain operations, on any platform, for tests.
    """
    # Imported here, because Pallas adds 0.3 s to the start and only GPUs need it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    num_rows, inputs = rows_RI.shape
    outputs, num_experts = kernels.shape[1 if transposed else 2], kernels.shape[0]
    chunk = _CHUNK_BYTES // rows_RI.dtype.itemsize
    columns = outputs // TILE
    tiles = num_tiles(num_rows, num_experts)

    def multiply(expert_M: Any, start_M: Any, end_M: Any, rows_ref: Any, kernels_ref: Any, y_ref: Any) -> None:
        number = pl.program_id(0)
        neighbours, within = number // (_NEIGHBOURS * columns), number % (_NEIGHBOURS * columns)
        tile, column = neighbours * _NEIGHBOURS + within % _NEIGHBOURS, within // _NEIGHBOURS
        expert, start, end = expert_M[tile], start_M[tile], end_M[tile]
        at = jnp.minimum(start, num_rows - TILE)
        rows_T = at + jnp.arange(TILE)
        is_own_T1 = ((rows_T >= start) & (rows_T < end))[:, None]
        here = pl.ds(column * TILE, TILE)

        @pl.when(start < end)
        def _() -> None:
            def step(turn: Array, sum_TO: Array) -> Array:
                summed = pl.ds(turn * chunk, chunk)
                x_TC = triton.load(rows_ref.at[pl.ds(at, TILE), summed], mask=is_own_T1, other=0)
                kernel = triton.load(kernels_ref.at[(expert, here, summed) if transposed else (expert, summed, here)])
                return sum_TO + triton.dot(x_TC, kernel, trans_b=transposed)

            sum_TO = jax.lax.fori_loop(0, inputs // chunk, step, jnp.zeros((TILE, TILE), jnp.float32))
            triton.store(y_ref.at[pl.ds(at, TILE), here], sum_TO.astype(y_ref.dtype), mask=is_own_T1)

    return pl.pallas_call(
        multiply,
        jax.ShapeDtypeStruct((num_rows, outputs), rows_RI.dtype, manual_axis_type=manual_type(rows_RI)),
        grid=(tiles * columns,),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
        name="expert_products",
    )(*_tiles(group_sizes_E, tiles), rows_RI, kernels)


def tile_kernel_gradients(
    rows_RI: Array, gradient_RO: Array, group_sizes_E: Array, *, interpret: bool = False
) -> Array:
    """Sum row times gradient over the rows of each expert: float32 [E, I, O], the arguments as in `tile_products`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (num_rows, inputs), outputs, num_experts = rows_RI.shape, gradient_RO.shape[1], group_sizes_E.size
    chunk = _CHUNK_BYTES // rows_RI.dtype.itemsize
    columns = outputs // TILE

    def multiply(start_E: Any, end_E: Any, rows_ref: Any, gradient_ref: Any, y_ref: Any) -> None:
        expert, number = pl.program_id(1), pl.program_id(0)
        inputs_here, outputs_here = (pl.ds(n * TILE, TILE) for n in (number // columns, number % columns))
        start, end = start_E[expert], end_E[expert]

        def step(turn: Array, sum_IO: Array) -> Array:
            first = start + turn * chunk
            at = jnp.minimum(first, num_rows - chunk)
            rows_C = at + jnp.arange(chunk)
            is_own_C1 = ((rows_C >= first) & (rows_C < end))[:, None]
            # Both are masked: the rows of others may hold anything, and 0 times infinity is no number.
            x_CI = triton.load(rows_ref.at[pl.ds(at, chunk), inputs_here], mask=is_own_C1, other=0)
            g_CO = triton.load(gradient_ref.at[pl.ds(at, chunk), outputs_here], mask=is_own_C1, other=0)
            return sum_IO + triton.dot(x_CI, g_CO, trans_a=True)

        turns = (end - start + chunk - 1) // chunk
        y_ref[expert, inputs_here, outputs_here] = jax.lax.fori_loop(
            0, turns, step, jnp.zeros((TILE, TILE), jnp.float32)
        )

    shape = (num_experts, inputs, outputs)
    ends_E = jnp.cumsum(group_sizes_E)
    return pl.pallas_call(
        multiply,
        jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=manual_type(rows_RI)),
        grid=(inputs // TILE * columns, num_experts),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
        name="expert_kernel_gradients",
    )(ends_E - group_sizes_E, ends_E, rows_RI, gradient_RO)


def _tiles(group_sizes_E: Array, tiles: int) -> tuple[Array, Array, Array]:
    """Expert, first row and end of the rows of each tile: int32 [M] each; the end is the first row of an empty tile."""
    ends_E, tiles_E = jnp.cumsum(group_sizes_E), (group_sizes_E + TILE - 1) // TILE
    after_E = jnp.cumsum(tiles_E)
    tile_M = jnp.arange(tiles)
    expert_M = jnp.minimum(jnp.sum(tile_M[:, None] >= after_E, axis=1, dtype=jnp.int32), group_sizes_E.size - 1)
    turn_M = tile_M - (after_E - tiles_E)[expert_M]
    start_M = (ends_E - group_sizes_E)[expert_M] + turn_M * TILE
    end_M = jnp.where(tile_M < after_E[-1], ends_E[expert_M], start_M)
    return expert_M, start_M, end_M


# --- One function with the gradients of its form. ---

BLOCKED = Form(
    lambda rows, kernels, sizes: block_products(rows, kernels, sizes, block=_block(rows, sizes)),
    lambda rows, kernels, gradient, sizes: block_gradients(rows, kernels, gradient, sizes, block=_block(rows, sizes)),
)
TILED = tiled()


def multiply_groups(form: Form, rows_RI: Array, kernels_EIO: Array, group_sizes_E: Array) -> Array:
    """`grouped_matmul` in a form, with the gradients of that form."""
    return _multiply(form, *vary_alike(rows_RI, kernels_EIO, group_sizes_E))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(form: Form, rows_RI: Array, kernels_EIO: Array, group_sizes_E: Array) -> Array:
    return form.products(rows_RI, kernels_EIO, group_sizes_E)


def _multiply_forward(
    form: Form, rows_RI: Array, kernels_EIO: Array, group_sizes_E: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return form.products(rows_RI, kernels_EIO, group_sizes_E), (rows_RI, kernels_EIO, group_sizes_E)


def _multiply_backward(form: Form, saved: tuple[Array, Array, Array], gradient_RO: Array) -> tuple[Array, Array, None]:
    rows_RI, kernels_EIO, group_sizes_E = saved
    rows_gradient, kernels_gradient = form.gradients(rows_RI, kernels_EIO, gradient_RO, group_sizes_E)
    return rows_gradient, kernels_gradient.astype(kernels_EIO.dtype), None


_multiply.defvjp(_multiply_forward, _multiply_backward)
