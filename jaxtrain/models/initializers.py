"""Initial values in exact arithmetic, so that they have the same bits on every mesh, compiler and backend.

The usual normal draw ends in a polynomial (the inverse error function) that compilers fuse differently for different
shapes of a shard: on jax 0.12, kernels in four shards differed in the last bit. Integers do not round.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]

WORDS = 4  # of 32 random bits, each two 16-bit integers
MEAN = WORDS * (2**16 - 1)
_STDDEV = math.sqrt(2 * WORDS * (2**32 - 1) / 12)


def normal(stddev: float) -> Initializer:
    """Make an initializer whose draws are close to normal: sums of eight 16-bit uniform integers, scaled once.

    By the central limit theorem (Irwin-Hall distribution) the draws have mean 0, exactly this variance and kurtosis
    2.85 (a normal distribution has 3), and none is beyond 4.9 standard deviations. The sum is below 2^24, so that
    float32 holds it exactly and the one multiplication is the only rounding.

    Args:
        stddev: standard deviation of the draws.

    Returns:
        (key, shape, dtype) -> array.
    """

    def initialize(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jaxtrain_exact_normal(key, jnp.float32(stddev / _STDDEV), shape=shape).astype(dtype)

    return initialize


@functools.partial(jax.jit, static_argnames="shape")
def jaxtrain_exact_normal(key: jax.Array, scale: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    """Draw centred sums of eight 16-bit uniform integers, times a scale.

    A function with a name that no user's has in a traced program, so that `models/host_draws.py` finds it there.

    Args:
        key: typed key.
        scale: float32 [].
        shape: of the draws.

    Returns:
        float32 of this shape.
    """

    def add(total: jax.Array, word_key: jax.Array) -> tuple[jax.Array, None]:
        word = jax.random.bits(word_key, shape, jnp.uint32)
        return total + (word & 0xFFFF).astype(jnp.int32) + (word >> 16).astype(jnp.int32), None

    # A loop, because each random draw adds a long program to compile.
    total, _ = jax.lax.scan(add, jnp.full(shape, -MEAN, jnp.int32), jax.random.split(key, WORDS))
    return total.astype(jnp.float32) * scale


def fan_in_normal(gain: float) -> Initializer:
    """Make `normal` with the variance gain / fan-in, where all dims except the last are inputs.

    Source: He et al. 2015, with gain 2 before a ReLU.

    Args:
        gain: variance of the outputs for inputs of variance 1.

    Returns:
        (key, shape, dtype) -> array.
    """

    def initialize(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return normal(math.sqrt(gain / math.prod(shape[:-1])))(key, shape, dtype)

    return initialize
