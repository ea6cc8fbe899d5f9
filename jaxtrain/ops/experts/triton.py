"""Grouped matmuls by blocks of rows as Triton kernels, through Pallas: the form for NVIDIA.

A program multiplies one tile of the result. Tiles of rows belong to one expert each; the last tile of an expert reaches
into the rows of the next one, which it neither reads nor writes. Tiles beyond the filled rows end at once, so that
empty experts and unfilled rows cost nothing.

Shapes: R rows, I input and O output features, E experts, T rows of a tile, M tiles.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxtrain.layout.manual import manual_type

# Rows and columns of a tile of the result. With chunks of the summed dim of 128 bytes, three of which are on their way,
# both operands take 96 KB of the 227 KB of a multiprocessor of H100.
TILE = 128
_CHUNK_BYTES = 128
_WARPS, _STAGES = 8, 3
# Tiles of rows whose programs are neighbours: they share the columns of a kernel in the cache.
_NEIGHBOURS = 8


def takes(num_rows: int, inputs: int, outputs: int) -> bool:
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
