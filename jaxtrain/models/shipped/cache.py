"""The keys and values of earlier positions that a decoder keeps, for all of its layers in one array each.

A layer writes its own part of the whole arrays, which travel through the layers as a carry: where they are donated, a
step writes a few numbers and copies nothing. Layers with a window may have arrays of their own, in which the last R
positions are kept in a ring.

Shapes: N layers, B batch, T new tokens, S positions of the cache (R of a ring), G key-value heads, K head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxtrain.layout.sharding import constrain
from jaxtrain.models.decoder import NOWHERE
from jaxtrain.precision.kernels import round_to_int8

# `key` and `value` [N, B, G, S, K]; of int8 also `key_scale` and `value_scale`, float32 [N, B, G, S]. Of layers that
# keep a ring, the same under names with this prefix.
Cache = dict[str, jax.Array]
RING = "ring_"

# Where the layers of a decode step are written out, with kernels that are constant slices of their stack: XLA copies
# what a loop slices before a GPU multiplies it, so that every weight would be read, written and read again.
UNROLLED_ON = ("gpu",)
# New tokens of a row in a decode step, with a draft; more are a part of a prompt, whose products take longer than that.
_MOST_DECODED = 16

_AXES = (None, "batch", "activation_kv_heads", None, None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """The cache of all layers, and which layer it is in the hands of.

    Attributes:
        arrays: of all layers.
        layer: int32 [], index of the layer among those that keep all positions, or their number for another one; a
            NumPy integer where layers are written out. None: there are no such layers.
        ring_layer: the same among those that keep a ring.
    """

    arrays: Cache
    layer: jax.Array | np.integer | None
    ring_layer: jax.Array | np.integer | None = None

    @property
    def length(self) -> int:
        """Positions of the cache: S; of a cache of rings alone, R."""
        return self.arrays["key" if "key" in self.arrays else f"{RING}key"].shape[3]

    @property
    def ring_size(self) -> int:
        """Positions of the ring: R."""
        return self.arrays[f"{RING}key"].shape[3]


def unrolled_on(new_tokens: int) -> tuple[str, ...]:
    """The platforms on which layers are written out instead of scanned, for so many new tokens of a row."""
    return UNROLLED_ON if new_tokens <= _MOST_DECODED else ()


def init_cache(num_layers: int, batch: int, length: int, groups: int, head_dim: int, dtype: DTypeLike) -> Cache:
    """A cache of zeros, sharded as the keys and values of a batch are; of int8 each position of a head has a scale."""
    shape = (num_layers, batch, groups, length, head_dim)
    cache = {name: constrain(jnp.zeros(shape, dtype), *_AXES) for name in ("key", "value")}
    if jnp.dtype(dtype) != jnp.int8:
        return cache
    scales = {f"{name}_scale": constrain(jnp.ones(shape[:-1]), *_AXES[:-1]) for name in cache}
    return cache | scales


def init_ring_cache(
    windows: Sequence[int | None],
    batch: int,
    length: int,
    ring_size: int,
    groups: int,
    head_dim: int,
    dtype: DTypeLike,
) -> Cache:
    """A cache of zeros in which the layers that have a window (in `windows`, of each layer) keep a ring."""
    whole = sum(window is None for window in windows)
    sizes = (batch, ring_size, groups, head_dim)
    ring = {f"{RING}{name}": leaf for name, leaf in init_cache(len(windows) - whole, *sizes, dtype).items()}
    return ring if not whole else init_cache(whole, batch, length, groups, head_dim, dtype) | ring


def layer_indices(windows: Sequence[int | None], cache: Cache) -> tuple[Any, Any]:
    """The `layer` and `ring_layer` of each layer, int32 [number of layers]; None as there.

    They are NumPy's, so that the index of a layer is a constant where layers are written out.
    """
    if f"{RING}key" not in cache:
        return np.arange(len(windows), dtype=np.int32), None
    in_ring_N = np.array([window is not None for window in windows])

    def indices(those_N: np.ndarray) -> np.ndarray:
        return np.where(those_N, np.cumsum(those_N) - 1, those_N.sum()).astype(np.int32)

    return None if in_ring_N.all() else indices(~in_ring_N), indices(in_ring_N)


def ring_positions(positions_BT: jax.Array, places_S: jax.Array, ring_size: int) -> jax.Array:
    """The positions that some places of a ring hold once the new tokens are written; below 0: none of this text.

    Places that hold tokens behind the last one (drafts that were refused, padding) count as those of the positions
    that stood there before, which no window reaches: it is what a ring has room for beyond the window.

    Returns:
        int32 [B, S].
    """
    last_B1 = jnp.max(jnp.where(positions_BT < NOWHERE, positions_BT, -1), axis=1, keepdims=True)
    return last_B1 - (last_B1 - places_S) % ring_size


def write_cache(cache: LayerCache, key_BTGK: jax.Array, value_BTGK: jax.Array, positions_BT: jax.Array) -> LayerCache:
    """The cache with new keys and values at their positions; positions that it does not have are dropped.

    A ring takes all positions below `NOWHERE`. An index of a layer that arrays do not have is dropped too, so that a
    layer of a scan writes into the arrays of its own kind alone.
    """
    arrays, new = dict(cache.arrays), {"key": key_BTGK, "value": value_BTGK}
    if cache.layer is not None:
        arrays |= _written(arrays, "", cache.layer, new, positions_BT)
    if cache.ring_layer is not None:
        size = cache.ring_size
        places_BT = jnp.where(positions_BT < NOWHERE, positions_BT % size, size)
        arrays |= _written(arrays, RING, cache.ring_layer, new, places_BT)
    return LayerCache(arrays, cache.layer, cache.ring_layer)


def _written(
    arrays: Cache, prefix: str, layer: jax.Array | np.integer, new: dict[str, jax.Array], positions_BT: jax.Array
) -> Cache:
    """The arrays of one kind of layers with new keys and values."""
    written, rows_B1 = {}, jnp.arange(positions_BT.shape[0])[:, None]
    for name, new_BTGK in new.items():
        old = arrays[f"{prefix}{name}"]
        if old.dtype == jnp.int8:
            new_BTGK, scale_BTG1 = round_to_int8(new_BTGK, (3,))
            scales = arrays[f"{prefix}{name}_scale"].at[layer, rows_B1, :, positions_BT].set(scale_BTG1[..., 0])
            written[f"{prefix}{name}_scale"] = constrain(scales, *_AXES[:-1])
        whole = old.at[layer, rows_B1, :, positions_BT].set(new_BTGK.astype(old.dtype))
        written[f"{prefix}{name}"] = constrain(whole, *_AXES)
    return written


def read_cache(
    cache: LayerCache, name: str, *, start: jax.Array | int, size: int, ring: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Some keys or values of the layer.

    Returns:
        [B, G, size, K], and the scales float32 [B, G, size] that they are to be multiplied by; None: they have none.
    """

    def part(name: str) -> jax.Array:
        whole, zero = cache.arrays[name], jnp.int32(0)
        if isinstance(layer, np.integer) and isinstance(start, int):
            # A constant slice, which becomes a part of the product that reads it.
            return whole[int(layer), :, :, start : start + size]
        begin = [layer, zero, zero, jnp.asarray(start, jnp.int32), zero][: whole.ndim]
        sizes = (1, *whole.shape[1:3], size, *whole.shape[4:])
        return jax.lax.dynamic_slice(whole, begin, sizes)[0]

    layer = cache.ring_layer if ring else cache.layer
    assert layer is not None
    name = f"{RING}{name}" if ring else name
    scale = f"{name}_scale"
    return part(name), part(scale) if scale in cache.arrays else None
