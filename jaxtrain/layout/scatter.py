"""Gradients that are scattered over `data` layer by layer, in code that handles that axis itself (ZeRO-2).

There a parameter is replicated and its gradient a sum over the rows of one shard. What is differentiated is not the
parameter but an array of the shape of a device's part, which is attached to the parameter where it is used: there the
backward pass sums the gradient over `data`, and keeps the part. So only one layer at a time has a whole gradient.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxtrain.layout.sharding import Params, current_layout, path_name

# Elements of a gradient that are summed in float32 at once, where it does not come layer by layer: 64 MiB.
_PIECE = 2**24


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scattered:
    """A stack of parameters, whose layers are attached to their parts inside the scan over it.

    Attributes:
        whole: the parameter [layers, ...].
        part: float32, the shape of `whole` with its dim `dim` divided by the shards of `data`.
        dim: over which gradients are scattered; the first dim counts layers.
    """

    whole: jax.Array
    part: jax.Array
    dim: int = field(metadata={"static": True})


# Path -> (part, dim) of the parameters of the step that is being traced. Set by `use_parts` around a trace.
_parts: contextvars.ContextVar[Mapping[str, tuple[jax.Array, int]] | None] = contextvars.ContextVar(
    "jaxtrain_parts", default=None
)


@contextlib.contextmanager
def use_parts(parts: Mapping[str, tuple[jax.Array, int]]) -> Iterator[None]:
    """Give `attach_parts` what is differentiated while a model is traced, by path: a part and its dim."""
    token = _parts.set(parts)
    try:
        yield
    finally:
        _parts.reset(token)


def attach_parts(params: Params, *, skip: tuple[str, ...]) -> Params:
    """The parameters attached to their parts, where `use_parts` gave any.

    Args:
        params: as a model is applied to them.
        skip: sub-trees whose layers are attached one at a time, by `attach_layers`; their arrays come as `Scattered`.
            The factors of an adapter, which are small and read before that, are attached at once, and so is a stack
            that is scattered over its layers, as one may be whose table does not name that dim.
    """
    parts = _parts.get()
    if parts is None:
        return params

    def attach(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array | Scattered:
        name = path_name(path)
        if name not in parts:
            return leaf
        part, dim = parts[name]
        is_array = all(isinstance(key, jax.tree_util.DictKey) for key in path)
        if dim > 0 and is_array and any(name == one or name.startswith(f"{one}/") for one in skip):
            return Scattered(leaf, part, dim)
        return _attach(leaf, part, dim)

    return jax.tree_util.tree_map_with_path(attach, params)


def attach_layers(params: Params) -> Params:
    """One layer of each parameter, attached to its part where `attach_parts` left it to the scan."""

    def attach(leaf: jax.Array | Scattered) -> jax.Array:
        return _attach(leaf.whole, leaf.part, leaf.dim - 1) if isinstance(leaf, Scattered) else leaf

    return jax.tree.map(attach, params, is_leaf=lambda leaf: isinstance(leaf, Scattered))


def _attach(whole: jax.Array, part: jax.Array, dim: int) -> jax.Array:
    """`whole`, whose gradient goes to `part`: summed over `data` in float32 and scattered over a dim."""

    @jax.custom_vjp
    def attach(whole: jax.Array, part: jax.Array) -> jax.Array:
        return whole

    def forward(whole: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
        return whole, None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros_like(gradient), _sum_and_scatter(gradient, jax.ShapeDtypeStruct(part.shape, part.dtype), dim)

    attach.defvjp(forward, backward)
    return attach(whole, part)


def _sum_and_scatter(gradient: jax.Array, part: jax.ShapeDtypeStruct, dim: int) -> jax.Array:
    """Sum a gradient over `data` in the dtype of a device's part, and keep that part of it.

    Of a large gradient (an embedding's) a piece at a time, so that a copy of it in float32 is never whole.
    """

    def scatter(piece: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(piece.astype(part.dtype), "data", scatter_dimension=dim, tiled=True)

    split, count = _pieces(gradient, dim)
    if count == 1:
        return scatter(gradient)
    width = gradient.shape[split] // count

    def one(summed: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        piece = jax.lax.dynamic_slice_in_dim(gradient, start, width, axis=split)
        return jax.lax.dynamic_update_slice_in_dim(summed, scatter(piece), start, axis=split), None

    return jax.lax.scan(one, jnp.zeros(part.shape, part.dtype), jnp.arange(count) * width)[0]


def _pieces(gradient: jax.Array, dim: int) -> tuple[int, int]:
    """The dim over which a gradient is taken in pieces, and their number; 1 where it is scattered at once."""
    layout = current_layout()
    # Pieces of what is sharded over another axis would be gathered over it.
    if layout is None or layout.mesh.size > layout.mesh.shape["data"]:
        return dim, 1
    wanted = -(-gradient.size // _PIECE)
    others = [(size, other) for other, size in enumerate(gradient.shape) if other != dim]
    size, split = max(others, default=(1, dim))
    return split, next((count for count in range(wanted, min(4 * wanted, size) + 1) if size % count == 0), 1)
