"""Optimizer state in fewer bytes: any transformation with its large moments kept in bfloat16 or in 8 bits.

Arithmetic stays float32: moments are decoded, the transformation runs, and what it returns is encoded again. Rounding
is stochastic. To nearest, a second moment stands still: at b2 = 0.999 it shrinks by 0.1 % a step, which is less than
half of the distance between two neighbours in bfloat16 (0.4 %), let alone in 8 bits.

int8: a code is the head of a float32, and the elements of a block share the exponent of their largest (block-wise
quantization, Dettmers et al. 2021, with a floating code in place of their table). A moment with a sign has 1 bit of
sign, 4 of exponent and 3 of mantissa and reaches from the largest of its block down to 2^-16 of it; one without has
5 and 3 and reaches down to 2^-32, and never falls to 0: an element with a first moment but no second would explode.
No arithmetic on floats is involved, so that codes are the same on every layout and machine that computes the same
moments.

The codes of a parameter have its shape, so that they are sharded, pipelined and checkpointed as a moment is.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optimizer_rules import is_stored, moment_block

# Bits of a float32 that a code drops: 20 of the 23 of the mantissa.
_DROPPED = 20
_STEPS = 1 << (23 - _DROPPED)  # codes in an octave
_BFLOAT16_DROPPED = 16


class StoredState(NamedTuple):
    """State of `store_moments`.

    Attributes:
        count: int32 [], updates done; rounding draws its numbers from it.
        inner: the state of the transformation, its large moments bfloat16 or codes (uint8, shape of the parameter).
        exponents: for each code leaf, uint8 [..., blocks of the last dim]; None for what is no code.
    """

    count: jax.Array
    inner: Any
    exponents: Any


def store_moments(
    transformation: optax.GradientTransformation, moments: str, *, nonnegative: tuple[str, ...] = ()
) -> optax.GradientTransformation:
    """The transformation with its large moments stored as `moments` says.

    Args:
        transformation: its state holds trees like the parameters.
        moments: float32 (the transformation itself), bfloat16 or int8.
        nonnegative: fields of its state that are never negative.

    Returns:
        gradients (fp32) -> updates, with a `StoredState`.
    """
    if moments == "float32":
        return transformation

    def encode(state: Any, count: jax.Array) -> StoredState:
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        stored, exponents = [], []
        for number, (path, leaf) in enumerate(leaves):
            random = _random_bits(leaf.shape, count, number)
            kept, exponent = leaf, None
            if moments == "bfloat16" and _is_moment(leaf):
                kept = _to_bfloat16(leaf, random)
            elif moments == "int8" and _is_moment(leaf) and (block := moment_block(leaf.shape)) is not None:
                signed = getattr(path[0], "name", None) not in nonnegative
                kept, exponent = to_codes(leaf, random, block=block, signed=signed)
            stored.append(kept)
            exponents.append(exponent)
        return StoredState(count, structure.unflatten(stored), structure.unflatten(exponents))

    def decode(state: StoredState) -> Any:
        def one(path: tuple[Any, ...], leaf: jax.Array, exponents: jax.Array | None) -> jax.Array:
            if exponents is not None:
                return from_codes(leaf, exponents, signed=getattr(path[0], "name", None) not in nonnegative)
            return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

        return jax.tree_util.tree_map_with_path(one, state.inner, state.exponents)

    def init(params: Any) -> StoredState:
        # Moments begin at 0, which is 0 in every format; to encode it would only be work for the compiler.
        shapes = jax.eval_shape(lambda: encode(transformation.init(params), jnp.int32(0)))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return zeros

    def update(updates: Any, state: StoredState, params: Any = None) -> tuple[Any, StoredState]:
        updates, inner = transformation.update(updates, decode(state), params)
        return updates, encode(inner, state.count + 1)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def to_codes(x: jax.Array, random: jax.Array, *, block: int, signed: bool) -> tuple[jax.Array, jax.Array]:
    """Codes of x, and the exponents of its blocks.

    Args:
        x: float32 [..., L]; nothing negative unless `signed`.
        random: uint32 [..., L], for rounding.
        block: divides L.
        signed: see the top of the file.

    Returns:
        uint8 [..., L] and uint8 [..., L / block].
    """
    largest = 127 if signed else 255
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)
    blocks = bits.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    # Bits of positive floats are in the order of the floats. What the largest can be rounded up to decides.
    top = jnp.max(blocks, axis=-1) + ((1 << _DROPPED) - 1)
    exponents = top >> 23
    rounded = (bits + (random & ((1 << _DROPPED) - 1))) >> _DROPPED
    first = _first_code(exponents, largest)
    codes = rounded.astype(jnp.int32) - _per_element(first, x.shape)
    codes = jnp.maximum(codes, 0 if signed else 1)
    codes = jnp.where(bits == 0, 0, codes)
    if signed:
        codes = codes | jnp.where(x < 0, 128, 0)
    return codes.astype(jnp.uint8), exponents.astype(jnp.uint8)


def from_codes(codes: jax.Array, exponents: jax.Array, *, signed: bool) -> jax.Array:
    """The float32 array of codes and exponents that `to_codes` gave."""
    largest = 127 if signed else 255
    codes = codes.astype(jnp.int32)
    magnitudes = codes & largest
    heads = magnitudes + _per_element(_first_code(exponents, largest), codes.shape)
    # Below the smallest normal number there is nothing to keep.
    heads = jnp.where((magnitudes == 0) | (heads < _STEPS), 0, heads)
    values = jax.lax.bitcast_convert_type(heads.astype(jnp.uint32) << _DROPPED, jnp.float32)
    return jnp.where(codes > 127, -values, values) if signed else values


def _first_code(exponents: jax.Array, largest: int) -> jax.Array:
    """The head of a float32 that code 0 would stand for, so that `largest` is the last head of the largest octave."""
    return exponents.astype(jnp.int32) * _STEPS + (_STEPS - 1 - largest)


def _per_element(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number a block [..., L / block] as one an element [..., L]."""
    block = shape[-1] // blocks.shape[-1]
    return jnp.broadcast_to(blocks[..., None], (*blocks.shape, block)).reshape(shape)


def _is_moment(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and is_stored(leaf.shape)


def _to_bfloat16(x: jax.Array, random: jax.Array) -> jax.Array:
    """x in bfloat16, rounded up with the probability that keeps the mean."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (random & ((1 << _BFLOAT16_DROPPED) - 1))
    # The head of the bits is the number: no second rounding.
    return jax.lax.bitcast_convert_type((bits >> _BFLOAT16_DROPPED).astype(jnp.uint16), jnp.bfloat16)


def _random_bits(shape: tuple[int, ...], count: jax.Array, number: int) -> jax.Array:
    """Uint32 numbers for one rounding of leaf `number`: a hash of the element's place, so alike on every layout.

    A multiplicative hash (the finalizer of MurmurHash3) costs a tenth of threefry and rounding asks for no more.
    """
    place = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(shape))):
        place += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    seed = _mix(count.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + jnp.uint32(number))
    return _mix(place * jnp.uint32(0x9E3779B1) + seed)


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
