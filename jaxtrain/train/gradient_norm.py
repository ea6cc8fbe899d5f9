"""The norm of all gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

# Arrays of fewer elements are summed in microseconds.
_LARGE = 2**16
_SLICES = 16


def gradient_norm(tree: Any, *, sliced: bool) -> jax.Array:
    """Compute the root of the sum of all squares, float32 [].

    XLA on CPU writes the squares of an array to memory and adds them in three further kernels, on which a step of
    ResNet-50 spent a fifth of its time. Sixteen slices of an array, whose squares are added to one another first, are
    read once (docs/benchmarks.md has both times).

    Args:
        tree: gradients, float32, or complex64 where parameters are complex.
        sliced: whether large arrays are added up in slices, for arrays that are on one device.
    """
    leaves = jax.tree.leaves(tree)
    if not sliced or not leaves:
        return optax.tree.norm(tree)
    return jnp.sqrt(functools.reduce(jnp.add, map(_sum_of_squares, leaves)))


def _sum_of_squares(x: jax.Array) -> jax.Array:
    if x.size < _LARGE or x.size % _SLICES:
        return jnp.sum(_square(x))
    parts = jax.lax.split(x.reshape(_SLICES, -1), (1,) * _SLICES)
    return jnp.sum(functools.reduce(jnp.add, map(_square, parts)))


def _square(x: jax.Array) -> jax.Array:
    """The squared magnitude, which of complex numbers is no square."""
    return jnp.square(x) if not jnp.iscomplexobj(x) else jnp.square(x.real) + jnp.square(x.imag)
