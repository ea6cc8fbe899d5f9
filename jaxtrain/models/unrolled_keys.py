"""Keys that draw the numbers of jax's own threefry keys, by programs that compile faster on CPU.

On CPU jax writes each hash of Threefry-2x32 as a loop of five turns. To initialise a ResNet-18 takes fifty of them: 674
kernels and 1,430 copies, which took 12 s of processor time to compile where the step itself took 9 (jax 0.10.2).
Written out, a hash is part of one elementwise kernel.
"""

import functools
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import random as extended

from jaxtrain.layout.sharding import platform

# Threefry-2x32 with 20 rounds: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_GROUPS = 5  # of four rounds


def unrolled(key: jax.Array) -> jax.Array:
    """Return a key from which the same numbers follow; on CPU by hashes without loops, elsewhere the key itself.

    Args:
        key: typed key.
    """
    same = str(jax.random.key_impl(key)) == "threefry2x32" and jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    if platform() != "cpu" or not same:
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_implementation())


@functools.cache
def _implementation() -> Hashable:
    return extended.define_prng_impl(
        key_shape=(2,),
        seed=_seed,
        split=_split,
        random_bits=_random_bits,
        fold_in=lambda key_2, data: _hash(key_2, _seed(data)),
        name="threefry2x32_unrolled",
        tag="fryu",
    )


def _seed(seed: jax.Array | int) -> jax.Array:
    """The words of a key from an integer of 32 bits."""
    low = jnp.asarray(seed).astype(jnp.uint32)
    return jnp.stack([jnp.zeros_like(low), low])


def _split(key_2: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    numbers = _numbers(shape)
    return jnp.moveaxis(_hash(key_2, jnp.stack([jnp.zeros_like(numbers), numbers])), 0, -1)


def _random_bits(key_2: jax.Array, bits: int, shape: tuple[int, ...]) -> jax.Array:
    if bits != 32 or math.prod(shape) >= 2**32:
        own = jax.random.wrap_key_data(key_2, impl="threefry2x32")
        return jax.random.bits(own, shape, f"uint{bits}")
    numbers = _numbers(shape)
    left, right = threefry(key_2[0], key_2[1], jnp.zeros_like(numbers), numbers)
    return left ^ right


def _numbers(shape: tuple[int, ...]) -> jax.Array:
    """The number of each element, row by row, modulo 2^32: uint32 of this shape."""
    total = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        step = jnp.uint32(math.prod(shape[dim + 1 :]) % 2**32)
        total = total + step * jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    return total


def _hash(key_2: jax.Array, counts: jax.Array) -> jax.Array:
    """Hash pairs of words: uint32 [2, ...] -> uint32 [2, ...]."""
    return jnp.stack(threefry(key_2[0], key_2[1], counts[0], counts[1]))


def threefry(first: Any, second: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Hash pairs of words by pairs of words, uint32 arrays of jax or of NumPy whose shapes broadcast.

    Args:
        first: first word of the key.
        second: second word of the key.
        left: first word of what is hashed.
        right: second word of what is hashed.
    """
    words = [first, second, first ^ second ^ np.uint32(_PARITY)]
    left, right = left + words[0], right + words[1]
    for group in range(_GROUPS):
        for rotation in _ROTATIONS[group % 2]:
            left = left + right
            right = ((right << np.uint32(rotation)) | (right >> np.uint32(32 - rotation))) ^ left
        left = left + words[(group + 1) % 3]
        right = right + words[(group + 2) % 3] + np.uint32(group + 1)
    return left, right
