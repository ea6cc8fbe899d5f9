"""Optimizer state in fewer bytes: any transformation with its large moments kept in bfloat16 or in 8 bits.

Arithmetic stays float32: moments are decoded, the transformation runs, and what it returns is encoded again. Rounding
is stochastic. To nearest, a second moment stands still: at b2 = 0.999 it shrinks by 0.1 % a step, which is less than
half of the distance between two neighbours in bfloat16 (0.4 %), let alone in 8 bits.

int8: a code is a short float, and the elements of a block share the exponent of their largest (block-wise quantization,
Dettmers et al. 2021). As in their table, what is small is coarser: octaves near the largest have 16 codes, later ones
8, the last 4. A moment with a sign reaches from the largest of its block 14 octaves down, one without 31 octaves, and
never falls to 0: an element with a first moment and no second would explode. Nothing here is arithmetic on floats, so
that codes are the same on every layout and machine that computes the same moments.

The codes of a parameter have its shape, so that they are sharded, pipelined and checkpointed as a moment is.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim.rules import is_stored, moment_block

_MANTISSA = 23
# Octaves below the largest of a block that drop 19, 20 and 21 bits of the mantissa, so have 16, 8 and 4 codes.
_DROPPED = (19, 20, 21)
_OCTAVES = {"signed": (4, 5, 5), "unsigned": (8, 8, 15)}  # 124 codes and a sign, 252 codes
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

    def signed(path: tuple[Any, ...]) -> bool:
        return getattr(path[0], "name", None) not in nonnegative

    def block_exponents(state: Any) -> Any:
        """The exponents that the moments of a state get; None for what is no code."""

        def one(leaf: jax.Array) -> jax.Array | None:
            block = moment_block(leaf.shape) if moments == "int8" and _is_moment(leaf) else None
            return None if block is None else largest_exponents(leaf, block)

        return jax.tree.map(one, state)

    def encode(state: Any, exponents: Any, count: jax.Array) -> StoredState:
        numbers = itertools.count()

        def one(path: tuple[Any, ...], leaf: jax.Array, exponents: jax.Array | None) -> jax.Array:
            random = _random_bits(leaf.shape, count, next(numbers))
            if exponents is not None:
                return to_codes(leaf, exponents, random, signed=signed(path))
            return _to_bfloat16(leaf, random) if moments == "bfloat16" and _is_moment(leaf) else leaf

        return StoredState(count, jax.tree_util.tree_map_with_path(one, state, exponents), exponents)

    def decode(state: StoredState) -> Any:
        def one(path: tuple[Any, ...], leaf: jax.Array, exponents: jax.Array | None) -> jax.Array:
            if exponents is not None:
                return from_codes(leaf, exponents, signed=signed(path))
            return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

        return jax.tree_util.tree_map_with_path(one, state.inner, state.exponents)

    def init(params: Any) -> StoredState:
        # Moments begin at 0, which is 0 in every format; to encode it would only be work for the compiler.
        def start() -> StoredState:
            state = transformation.init(params)
            return encode(state, block_exponents(state), jnp.int32(0))

        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(start))

    def update(updates: Any, state: StoredState, params: Any = None) -> tuple[Any, StoredState]:
        exponents = state.exponents
        if moments == "int8":
            # Once for the exponents, and again for the codes: a compiler that shared the two would keep the new moments
            # of all parameters in float32 in between, 5 bytes a parameter (XLA for H100, jaxlib 0.10.2).
            exponents = block_exponents(transformation.update(updates, decode(state), params)[1])
            state, exponents = jax.lax.optimization_barrier((state, exponents))
        updates, inner = transformation.update(updates, decode(state), params)
        return updates, encode(inner, exponents, state.count + 1)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def largest_exponents(x: jax.Array, block: int) -> jax.Array:
    """Of each block of x [..., L], the exponent that its largest can be rounded up to: uint8 [..., blocks]."""
    bits = _bits(x).reshape(*x.shape[:-1], x.shape[-1] // block, block)
    # Bits of positive floats are in the order of the floats.
    return ((jnp.max(bits, axis=-1) + ((1 << _DROPPED[0]) - 1)) >> _MANTISSA).astype(jnp.uint8)


def to_codes(x: jax.Array, exponents: jax.Array, random: jax.Array, *, signed: bool) -> jax.Array:
    """Codes of x.

    Args:
        x: float32 [..., L]; nothing negative unless `signed`.
        exponents: uint8 [..., blocks], from `largest_exponents`.
        random: uint32 [..., L], for rounding.
        signed: see the top of the file.

    Returns:
        uint8 [..., L].
    """
    tiers = _tiers(signed)
    bits = _bits(x)
    above = bits.astype(jnp.int32) - _per_element(_lowest(exponents, signed), x.shape)
    codes = jnp.zeros(x.shape, jnp.int32)
    for tier in tiers:
        # Rounded up at the end of a tier it becomes the first of the next.
        noise = (random & ((1 << tier.dropped) - 1)).astype(jnp.int32)
        code = tier.first_code + ((above - tier.start + noise) >> tier.dropped)
        codes = jnp.where(above >= tier.start, code, codes)
    codes = jnp.where(bits == 0, 0, jnp.maximum(codes, 0 if signed else 1))
    return (codes | jnp.where(x < 0, 128, 0) if signed else codes).astype(jnp.uint8)


def from_codes(codes: jax.Array, exponents: jax.Array, *, signed: bool) -> jax.Array:
    """The float32 array of codes [..., L] and exponents [..., blocks]."""
    tiers = _tiers(signed)
    codes = codes.astype(jnp.int32)
    magnitudes = codes & 127 if signed else codes
    above = jnp.zeros(codes.shape, jnp.int32)
    for tier in tiers:
        here = tier.start + ((magnitudes - tier.first_code) << tier.dropped)
        above = jnp.where(magnitudes >= tier.first_code, here, above)
    bits = above + _per_element(_lowest(exponents, signed), codes.shape)
    # Below the smallest normal number there is nothing to keep.
    bits = jnp.where((magnitudes == 0) | (bits < 1 << _MANTISSA), 0, bits)
    values = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(codes > 127, -values, values) if signed else values


class _Tier(NamedTuple):
    """Octaves with equally many codes: bits dropped, where it starts above the lowest number, and its first code."""

    dropped: int
    start: int
    first_code: int


def _tiers(signed: bool) -> list[_Tier]:
    """From the lowest on; code 0 is 0."""
    found, start, code = [], 0, 1
    for octaves, dropped in zip(_OCTAVES["signed" if signed else "unsigned"][::-1], _DROPPED[::-1], strict=True):
        found.append(_Tier(dropped, start, code))
        start += octaves << _MANTISSA
        code += octaves << (_MANTISSA - dropped)
    return found


def _lowest(exponents: jax.Array, signed: bool) -> jax.Array:
    """Bits of the lowest number that a block holds; negative where that is below every float32."""
    octaves = sum(_OCTAVES["signed" if signed else "unsigned"])
    return (exponents.astype(jnp.int32) + 1 - octaves) << _MANTISSA


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)


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
