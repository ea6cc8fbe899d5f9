"""Random keys of a step whose batch is split, over microbatches and over shards of `data`.

What draws row by row (`row_keys`) draws the same numbers however a batch is split. The key itself holds the microbatch:
a variable of the trace would fail in functions that JAX traces once and calls again, such as a user's `jax.checkpoint`.
"""

from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp

from jaxtrain.layout.sharding import current_layout

# The words of a microbatch's key: two of a threefry key, the index of the microbatch, the number of microbatches, and
# the number of rows in each.
_NUM_WORDS = 5


def _threefry(words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words[:2], impl="threefry2x32")


def _with_microbatch(keys: jax.Array, words: jax.Array) -> jax.Array:
    """Return the words of threefry keys [...] as keys of the microbatch of `words`: uint32 [..., 5]."""
    microbatch = jnp.broadcast_to(words[2:], (*keys.shape, 3))
    return jnp.concatenate([jax.random.key_data(keys), microbatch], axis=-1)


def _draw(words: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """Return random bits, other ones in each microbatch."""
    return jax.random.bits(jax.random.fold_in(_threefry(words), words[2]), shape, f"uint{bit_width}")


_MICROBATCH = jax.extend.random.define_prng_impl(
    key_shape=(_NUM_WORDS,),
    seed=lambda seed: jnp.zeros(_NUM_WORDS, jnp.uint32),  # required, but no such key is made from a seed
    split=lambda words, shape: _with_microbatch(jax.random.split(_threefry(words), shape), words),
    random_bits=_draw,
    fold_in=lambda words, number: _with_microbatch(jax.random.fold_in(_threefry(words), number), words),
    name="microbatch",
    tag="microbatch",
)


def microbatch_key(key: jax.Array, index: jax.Array, microbatches: Any) -> jax.Array:
    """Return the key of a step as the key of one microbatch.

    Args:
        key: key of the step.
        index: index of the microbatch, int32 [].
        microbatches: the batch as `split_microbatches` returns it, arrays [microbatches, rows, ...].
    """
    sizes = next(x.shape[:2] for x in jax.tree.leaves(microbatches) if x.ndim > 1)
    words = jnp.stack([index, *sizes]).astype(jnp.uint32)
    words = jnp.concatenate([jax.random.key_data(key)[:2], words])
    return jax.random.wrap_key_data(words, impl=_MICROBATCH)


def _without_microbatch(key: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return the key of the step, and int32 [index, number, rows] of microbatches, or None without microbatches."""
    if jax.random.key_impl(key) != _MICROBATCH:
        return key, None
    words = jax.random.key_data(key)
    return _threefry(words), words[2:].astype(jnp.int32)


def row_keys(key: jax.Array, count: int) -> jax.Array:
    """Return keys [count] of the rows of an activation [count, ...], which follow from their numbers in the batch.

    A row of the batch may be several consecutive rows of the activation, such as the two answers of a pair.
    """
    shard = _shard_index()
    numbers = jnp.arange(count)
    if shard is not None:
        numbers = numbers + shard * count
    key, microbatch = _without_microbatch(key)
    if microbatch is not None:
        index, num_microbatches, num_rows = microbatch
        # Row r of microbatch `index` is row r * num_microbatches + index of the batch.
        repeats = jnp.maximum(count // num_rows, 1)
        numbers = (numbers // repeats * num_microbatches + index) * repeats + numbers % repeats
    return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)


def shard_key(key: jax.Array) -> jax.Array:
    """Return the key of this microbatch and this shard of `data`, for code that draws for all of its rows at once."""
    key, microbatch = _without_microbatch(key)
    if microbatch is not None:
        key = jax.random.fold_in(key, microbatch[0])
    shard = _shard_index()
    return key if shard is None else jax.random.fold_in(key, shard)


def _shard_index() -> jax.Array | None:
    """Return the index of this shard of `data` in a manual region, or None if all rows are computed together."""
    layout = current_layout()
    if layout is None or "data" not in layout.manual or layout.mesh.shape["data"] == 1:
        return None
    return jax.lax.axis_index("data")
