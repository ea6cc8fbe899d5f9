"""Where the cache of the slots is on the mesh, and how one slot's part of it is taken and put back."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxtrain.layout.rules import entry_degree
from jaxtrain.layout.sharding import Layout, logical_spec
from jaxtrain.models.decoder import make_cache
from jaxtrain.models.model import Decoder


@dataclass(frozen=True)
class CacheLayout:
    """The dims and shardings of a cache, leaf for leaf.

    Attributes:
        slot_dims: which dim of each leaf is that of the slots.
        shardings: slots are sharded as a batch is, and heads over `tensor`, where they divide.
    """

    slot_dims: Any
    shardings: Any

    def take(self, cache: Any, slot: jax.Array) -> Any:
        """One slot's part of a cache, with a dim of 1.

        Args:
            cache: of all slots.
            slot: index, int32 [].
        """
        return jax.tree.map(
            lambda leaf, dim: jax.lax.dynamic_slice_in_dim(leaf, slot, 1, axis=dim), cache, self.slot_dims
        )

    def put(self, cache: Any, own: Any, slot: jax.Array) -> Any:
        """The cache with a slot's part put back; see `take`."""

        def put(leaf: jax.Array, part: jax.Array, dim: int) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(leaf, part, slot, axis=dim)

        return jax.tree.map(put, cache, own, self.slot_dims)


def cache_layout(
    decoder: Decoder, layout: Layout, *, slots: int, length: int, chunk: int, dtype: DTypeLike
) -> CacheLayout:
    """Find the dims of a decoder's cache, and its shardings.

    Args:
        decoder: makes the cache.
        layout: of the model.
        slots: rows of the cache.
        length: positions of each.
        chunk: most tokens of a row that are written at a time.
        dtype: of keys and values.
    """

    def shapes(slots: int, more: int = 0) -> Any:
        return jax.eval_shape(lambda: make_cache(decoder, slots, length + more, dtype, chunk=chunk + more))

    def differs(first: Any, other: Any) -> int:
        return next((dim for dim, size in enumerate(first.shape) if size != other.shape[dim]), -1)

    cache = shapes(slots)
    # Shapes alone say which dim is which, so that a decoder may arrange its cache as it likes.
    slot_dims = jax.tree.map(differs, cache, shapes(slots + 1))
    # A ring grows with the chunk, and the other caches with the length.
    length_dims = jax.tree.map(differs, cache, shapes(slots, more=1))
    assert all(dim >= 0 for dim in jax.tree.leaves(slot_dims)), "every array of a cache has a row per text"

    def sharding(leaf: Any, slot_dim: int, length_dim: int) -> NamedSharding:
        names: list[str | None] = [None] * len(leaf.shape)
        names[slot_dim] = "batch"
        # The heads are the one dim between slots and positions, or the one after positions that directly follow slots.
        heads = slot_dim + 1 if length_dim == slot_dim + 2 else length_dim + 1
        if length_dim > slot_dim and heads < len(names):
            names[heads] = "activation_kv_heads"
        return NamedSharding(layout.mesh, fitting(layout, leaf.shape, *names))

    return CacheLayout(slot_dims, jax.tree.map(sharding, cache, slot_dims, length_dims))


def fitting(layout: Layout, shape: tuple[int, ...], *names: str | None) -> PartitionSpec:
    """The spec of logical axes, without those that a dim does not divide by.

    Args:
        layout: of the model.
        shape: of the array.
        names: logical axis of each dim; None: replicated.
    """
    entries = list(logical_spec(names, layout))
    entries += [None] * (len(shape) - len(entries))
    degrees = layout.mesh.shape
    return PartitionSpec(
        *(
            entry if size % entry_degree(entry, degrees) == 0 else None
            for entry, size in zip(entries, shape, strict=True)
        )
    )
