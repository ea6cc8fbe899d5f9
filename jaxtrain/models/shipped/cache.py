"""The keys and values of earlier positions that a decoder keeps, for all of its layers in one array each.

A layer writes its own part of the whole arrays, which travel through the layers as a carry: where they are donated, a
step writes a few numbers and copies nothing.

Shapes: N layers, B batch, T new tokens, S positions of the cache, G key-value heads, K head_dim.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxtrain.layout.sharding import constrain
from jaxtrain.precision.quantized import round_to_int8

# `key` and `value` [N, B, G, S, K]; of int8 also `key_scale` and `value_scale`, float32 [N, B, G, S].
Cache = dict[str, jax.Array]

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
        layer: int32 [], index of the layer; a NumPy integer where layers are written out.
    """

    arrays: Cache
    layer: jax.Array | np.integer

    @property
    def length(self) -> int:
        """Positions of the cache: S."""
        return self.arrays["key"].shape[3]


def unrolled_on(new_tokens: int) -> tuple[str, ...]:
    """The platforms on which layers are written out instead of scanned.

    Args:
        new_tokens: T, of each row.
    """
    return UNROLLED_ON if new_tokens <= _MOST_DECODED else ()


def init_cache(num_layers: int, batch: int, length: int, groups: int, head_dim: int, dtype: DTypeLike) -> Cache:
    """A cache of zeros, sharded as the keys and values of a batch are.

    Args:
        num_layers: N.
        batch: B.
        length: S.
        groups: G.
        head_dim: K.
        dtype: of keys and values: a float, or int8, of which each position of a head has a scale.
    """
    shape = (num_layers, batch, groups, length, head_dim)
    cache = {name: constrain(jnp.zeros(shape, dtype), *_AXES) for name in ("key", "value")}
    if jnp.dtype(dtype) != jnp.int8:
        return cache
    scales = {f"{name}_scale": constrain(jnp.ones(shape[:-1]), *_AXES[:-1]) for name in cache}
    return cache | scales


def write_cache(cache: LayerCache, key_BTGK: jax.Array, value_BTGK: jax.Array, positions_BT: jax.Array) -> LayerCache:
    """The cache with new keys and values at their positions; positions that it does not have are dropped.

    Args:
        cache: of the layer that writes.
        key_BTGK: keys, any float dtype.
        value_BTGK: values, the same dtype.
        positions_BT: int32.
    """
    arrays, rows_B1 = dict(cache.arrays), jnp.arange(positions_BT.shape[0])[:, None]
    for name, new_BTGK in (("key", key_BTGK), ("value", value_BTGK)):
        old = arrays[name]
        if old.dtype == jnp.int8:
            new_BTGK, scale_BTG1 = round_to_int8(new_BTGK, (3,))
            scales = arrays[f"{name}_scale"].at[cache.layer, rows_B1, :, positions_BT].set(scale_BTG1[..., 0])
            arrays[f"{name}_scale"] = constrain(scales, *_AXES[:-1])
        whole = old.at[cache.layer, rows_B1, :, positions_BT].set(new_BTGK.astype(old.dtype))
        arrays[name] = constrain(whole, *_AXES)
    return LayerCache(arrays, cache.layer)


def read_cache(
    cache: LayerCache, name: str, *, start: jax.Array | int, size: int
) -> tuple[jax.Array, jax.Array | None]:
    """Some keys or values of the layer.

    Args:
        cache: of the layer that reads.
        name: "key" or "value".
        start: first position.
        size: number of positions, at most those from `start` on.

    Returns:
        [B, G, size, K], and the scales float32 [B, G, size] that they are to be multiplied by; None: they have none.
    """

    def part(name: str) -> jax.Array:
        whole, zero = cache.arrays[name], jnp.int32(0)
        if isinstance(cache.layer, np.integer) and isinstance(start, int):
            # A constant slice, which becomes a part of the product that reads it.
            return whole[int(cache.layer), :, :, start : start + size]
        begin = [cache.layer, zero, zero, jnp.asarray(start, jnp.int32), zero][: whole.ndim]
        sizes = (1, *whole.shape[1:3], size, *whole.shape[4:])
        return jax.lax.dynamic_slice(whole, begin, sizes)[0]

    scale = f"{name}_scale"
    return part(name), part(scale) if scale in cache.arrays else None
