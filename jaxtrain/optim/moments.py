"""Optimizer state in fewer bytes: any transformation with its large moments stored in bfloat16 or in 8 bits.

Arithmetic stays float32: moments are decoded, the transformation runs, and what it returns is encoded again. Rounding
is stochastic. To nearest, a second moment stands still: at b2 = 0.999 it shrinks by 0.1 % per step, which is less than
half of the distance between two neighbours in bfloat16 (0.4 %), let alone in 8 bits.

The codes of a parameter have its shape, so that they are sharded, pipelined and checkpointed as a moment is.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim.rules import is_stored, moment_block
from jaxtrain.optim.short_floats import from_codes, largest_exponents, to_codes
from jaxtrain.optim.stochastic_rounding import random_bits, round_to_bfloat16

# A nested structure of arrays with None in some places. Its structure is the model's, so that no type describes it.
Tree = Any


class StoredState(NamedTuple):
    """State of `store_moments`.

    Attributes:
        count: int32 [], updates done; rounding draws its numbers from it.
        inner: the state of the transformation, its large moments bfloat16 or codes (uint8, shape of the parameter).
        exponents: for each array of codes, uint8 [..., blocks of the last dim]; None for every other array.
    """

    count: jax.Array
    inner: Tree
    exponents: Tree


@dataclass(frozen=True)
class _Format:
    """How moments are stored.

    Attributes:
        moments: bfloat16 or int8.
        nonnegative: fields of a transformation's state that are never negative.
    """

    moments: str
    nonnegative: tuple[str, ...]


def store_moments(
    transformation: optax.GradientTransformation, moments: str, *, nonnegative: tuple[str, ...] = ()
) -> optax.GradientTransformation:
    """Store the large moments of a transformation as `moments` says.

    Args:
        transformation: its state holds trees like the parameters.
        moments: float32 (the transformation itself), bfloat16 or int8.
        nonnegative: fields of its state that are never negative.

    Returns:
        gradients (float32) -> updates, with a `StoredState`.
    """
    if moments == "float32":
        return transformation
    form = _Format(moments, nonnegative)

    def init(params: Tree) -> StoredState:
        # Moments begin at 0, which is 0 in every format; to encode it would only be work for the compiler.
        def start() -> StoredState:
            state = transformation.init(params)
            return _encode(form, state, _exponents(form, state), jnp.int32(0))

        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(start))

    def update(updates: Tree, state: StoredState, params: Tree = None) -> tuple[Tree, StoredState]:
        exponents = state.exponents
        if moments == "int8":
            # Once for the exponents, and again for the codes: a compiler that shared the two would keep the new moments
            # of all parameters in float32 in between, 5 bytes per parameter (XLA for H100, jaxlib 0.10.2).
            exponents = _exponents(form, transformation.update(updates, _decode(form, state), params)[1])
            state, exponents = jax.lax.optimization_barrier((state, exponents))
        updates, inner = transformation.update(updates, _decode(form, state), params)
        return updates, _encode(form, inner, exponents, state.count + 1)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _exponents(form: _Format, state: Tree) -> Tree:
    """The exponents of the moments of a state; None for what is stored without."""

    def one(leaf: jax.Array) -> jax.Array | None:
        block = moment_block(leaf.shape) if form.moments == "int8" and _is_moment(leaf) else None
        return None if block is None else largest_exponents(leaf, block)

    return jax.tree.map(one, state)


def _encode(form: _Format, state: Tree, exponents: Tree, count: jax.Array) -> StoredState:
    """Encode the state of a transformation after its update number `count` (int32 [])."""
    numbers = jax.tree.unflatten(jax.tree.structure(state), range(len(jax.tree.leaves(state))))

    def one(path: jax.tree_util.KeyPath, leaf: jax.Array, exponents: jax.Array | None, number: int) -> jax.Array:
        random = random_bits(leaf.shape, count, number)
        if exponents is not None:
            return to_codes(leaf, exponents, random, signed=_is_signed(form, path))
        return round_to_bfloat16(leaf, random) if form.moments == "bfloat16" and _is_moment(leaf) else leaf

    return StoredState(count, jax.tree_util.tree_map_with_path(one, state, exponents, numbers), exponents)


def _decode(form: _Format, state: StoredState) -> Tree:
    """Decode the state of a transformation: moments in float32."""

    def one(path: jax.tree_util.KeyPath, leaf: jax.Array, exponents: jax.Array | None) -> jax.Array:
        if exponents is not None:
            return from_codes(leaf, exponents, signed=_is_signed(form, path))
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    return jax.tree_util.tree_map_with_path(one, state.inner, state.exponents)


def _is_signed(form: _Format, path: jax.tree_util.KeyPath) -> bool:
    """Whether a moment at this path of a state may be negative."""
    field = path[0]
    return not (isinstance(field, jax.tree_util.GetAttrKey) and field.name in form.nonnegative)


def _is_moment(leaf: jax.Array) -> bool:
    """Whether an array of a state is a moment that is large enough to be stored in less than float32."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) and is_stored(leaf.shape)
