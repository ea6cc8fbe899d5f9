"""Rows of a table by index, on any mesh: each device looks up the rows that it holds.

Shapes: B batch, L length, V vocabulary (or positions: the rows of the table), D model width.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jaxtrain.layout.manual import divides, run_manually, spec_of, vary_alike, vary_like
from jaxtrain.layout.scatter import has_parts
from jaxtrain.layout.sharding import current_layout


def _take(table_VD: Array, indices_BL: Array) -> Array:
    return jnp.take(table_VD, indices_BL, axis=0, mode="clip")


def _take_late(table_VD: Array, indices_BL: Array) -> Array:
    """`_take`, the zeros of whose gradient no compiler makes before the backward pass of all layers, and keeps."""

    @jax.custom_vjp
    def take(table_VD: Array, indices_BL: Array) -> Array:
        return _take(table_VD, indices_BL)

    def forward(table_VD: Array, indices_BL: Array) -> tuple[Array, Array]:
        return _take(table_VD, indices_BL), indices_BL

    def backward(indices_BL: Array, rows_BLD: Array) -> tuple[Array, None]:
        zero, rows_BLD = jax.lax.optimization_barrier((vary_like(jnp.zeros((), rows_BLD.dtype), rows_BLD), rows_BLD))
        start_VD = jnp.broadcast_to(zero, table_VD.shape)
        clipped_BL = jnp.clip(indices_BL, 0, table_VD.shape[0] - 1)
        return start_VD.at[clipped_BL].add(rows_BLD, mode="promise_in_bounds"), None

    take.defvjp(forward, backward)
    return take(*vary_alike(table_VD, indices_BL))


def embedding_lookup(table_VD: Array, indices_BL: Array, *, rows: str | None) -> Array:
    """Look up rows of a table; an index outside the table gives its first or last row.

    Where the rows are sharded over `tensor`, a device gives zeros for rows that it does not hold, and the sum over
    `tensor` is the row. The gradient is a scatter on each device and one sum, because the compiler's own partitioning
    of a scatter gathers the updates, and fails inside a pipeline stage (`spmd_partitioner_util.cc:497`, jax 0.10.2 to
    0.12.0).

    Args:
        table_VD: any float dtype, replicated over `fsdp`.
        indices_BL: integers; a batch of 1 serves all rows.
        rows: logical axis of V; None where the rows are replicated.

    Returns:
        [B, L, D] in the dtype of the table.

    Example:
        >>> table, ids = jnp.arange(8.0).reshape(4, 2), jnp.array([[0, 3]])
        >>> jt.embedding_lookup(table, ids, rows="vocab").tolist()
        [[[0.0, 1.0], [6.0, 7.0]]]
    """
    # Sizes of the table may not fit into ids of 8 or 16 bits, with which they are compared.
    indices_BL = indices_BL.astype(jnp.int32)
    layout = current_layout()
    batch = None if indices_BL.shape[0] == 1 else "batch"
    if layout is None or layout.mesh.size == 1 or not divides(layout, indices_BL, batch, "sequence"):
        return _take(table_VD, indices_BL)
    table_spec = spec_of(layout, rows, None)
    sharded = table_spec[0] is not None
    # Where gradients are scattered in every microbatch, memory counts, and nothing is differentiated forward.
    take = _take_late if has_parts() else _take

    def local(table: Array, indices: Array) -> Array:
        if not sharded:
            return take(table, indices)
        own = jnp.clip(indices, 0, table_VD.shape[0] - 1) - jax.lax.axis_index(table_spec[0]) * table.shape[0]
        held = (own >= 0) & (own < table.shape[0])
        found = jnp.where(held[..., None], take(table, own), jnp.zeros((), table.dtype))
        return jax.lax.psum(found, table_spec[0])

    return run_manually(
        local,
        layout,
        (table_VD,),
        (indices_BL,),
        in_specs=(table_spec, spec_of(layout, batch, "sequence")),
        out_specs=spec_of(layout, batch, "sequence", None),
    )
