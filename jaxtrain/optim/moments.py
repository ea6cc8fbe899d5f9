"""Optimizer state in fewer bytes: any transformation with its large moments stored in bfloat16 or in 8 bits.

Arithmetic stays float32: moments are decoded, the transformation runs, and what it returns is encoded again. Rounding
is stochastic. To nearest, a second moment stands still: at b2 = 0.999 it shrinks by 0.1 % per step, which is less than
half of the distance between two neighbours in bfloat16 (0.4 %), let alone in 8 bits. The codes of a parameter have its
shape, so that they are sharded, pipelined and checkpointed as a moment is.

An 8-bit code is a short float relative to the largest number of its block (block-wise quantization, Dettmers et al.
2021). As in their table, small numbers are coarser: octaves near the largest have 16 codes, later ones 8, the last 4.
Codes with a sign reach from the largest of the block 14 octaves down, codes without one 31 octaves. These never fall to
0: an element with a first moment and no second would explode. Nothing here is arithmetic on floats, so that codes are
the same on every layout and machine that computes the same numbers.

Shapes: L elements of the last dim, K of its blocks. The other dims are any.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim.rules import is_stored, moment_block

# A nested structure of arrays with None in some places. Its structure is the model's, so that no type describes it.
Tree = Any

_BFLOAT16_DROPPED = 16
_MANTISSA = 23
# Octaves below the largest of a block that drop 19, 20 and 21 bits of the mantissa, so have 16, 8 and 4 codes.
_DROPPED = (19, 20, 21)
_OCTAVES = {"signed": (4, 5, 5), "unsigned": (8, 8, 15)}  # 124 codes and a sign, 252 codes


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


def store_moments(
    transformation: optax.GradientTransformation, moments: str, *, nonnegative: tuple[str, ...] = ()
) -> optax.GradientTransformation:
    """Store the large moments of a transformation of float32 gradients in float32 (as it is), bfloat16 or int8.

    `nonnegative` are fields of its state that are never negative.
    """
    if moments == "float32":
        return transformation

    def init(params: Tree) -> StoredState:
        # Moments begin at 0, which is 0 in every format; to encode it would only be work for the compiler.
        def start() -> StoredState:
            state = transformation.init(params)
            return _encode(state, _exponents(state, moments), jnp.int32(0), moments, nonnegative)

        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(start))

    def update(updates: Tree, state: StoredState, params: Tree = None) -> tuple[Tree, StoredState]:
        exponents = state.exponents
        if moments == "int8":
            # Once for the exponents, and again for the codes: a compiler that shared the two would keep the new moments
            # of all parameters in float32 in between, 5 bytes per parameter (XLA for H100, jaxlib 0.10.2).
            exponents = _exponents(transformation.update(updates, _decode(state, nonnegative), params)[1], moments)
            state, exponents = jax.lax.optimization_barrier((state, exponents))
        updates, inner = transformation.update(updates, _decode(state, nonnegative), params)
        return updates, _encode(inner, exponents, state.count + 1, moments, nonnegative)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _exponents(state: Tree, moments: str) -> Tree:
    """The exponents of the moments of a state; None for what is stored without."""

    def one(leaf: jax.Array) -> jax.Array | None:
        block = moment_block(leaf.shape) if moments == "int8" and _is_moment(leaf) else None
        return None if block is None else largest_exponents(leaf, block)

    return jax.tree.map(one, state)


def _encode(state: Tree, exponents: Tree, count: jax.Array, moments: str, nonnegative: tuple[str, ...]) -> StoredState:
    """Encode the state of a transformation after its update number `count` (int32 [])."""
    numbers = jax.tree.unflatten(jax.tree.structure(state), range(len(jax.tree.leaves(state))))

    def one(path: jax.tree_util.KeyPath, leaf: jax.Array, exponents: jax.Array | None, number: int) -> jax.Array:
        random = random_bits(leaf.shape, count, number)
        if exponents is not None:
            return to_codes(leaf, exponents, random, signed=_is_signed(path, nonnegative))
        return round_to_bfloat16(leaf, random) if moments == "bfloat16" and _is_moment(leaf) else leaf

    return StoredState(count, jax.tree_util.tree_map_with_path(one, state, exponents, numbers), exponents)


def _decode(state: StoredState, nonnegative: tuple[str, ...]) -> Tree:
    """Decode the state of a transformation: moments in float32."""

    def one(path: jax.tree_util.KeyPath, leaf: jax.Array, exponents: jax.Array | None) -> jax.Array:
        if exponents is not None:
            return from_codes(leaf, exponents, signed=_is_signed(path, nonnegative))
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    return jax.tree_util.tree_map_with_path(one, state.inner, state.exponents)


def _is_signed(path: jax.tree_util.KeyPath, nonnegative: tuple[str, ...]) -> bool:
    """Whether a moment at this path of a state may be negative."""
    field = path[0]
    return not (isinstance(field, jax.tree_util.GetAttrKey) and field.name in nonnegative)


def _is_moment(leaf: jax.Array) -> bool:
    """Whether an array of a state is a moment that is large enough to be stored in less than float32."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) and is_stored(leaf.shape)


# --- Rounding to codes and to bfloat16. ---


def largest_exponents(x_L: jax.Array, block: int) -> jax.Array:
    """The exponent, uint8 [..., K], that the largest number of each block of float32 [..., L] can be rounded up to."""
    bits = _bits(x_L).reshape(*x_L.shape[:-1], x_L.shape[-1] // block, block)
    # Bits of positive floats are in the order of the floats.
    return ((jnp.max(bits, axis=-1) + ((1 << _DROPPED[0]) - 1)) >> _MANTISSA).astype(jnp.uint8)


def to_codes(x_L: jax.Array, exponents_K: jax.Array, random_L: jax.Array, *, signed: bool) -> jax.Array:
    """Round float32 [..., L] to codes, uint8 [..., L], up with the probability that keeps the mean.

    `exponents_K` are from `largest_exponents`, `random_L` uniform uint32; nothing is negative unless `signed`.
    """
    bits = _bits(x_L)
    above = bits.astype(jnp.int32) - _per_element(_lowest(exponents_K, signed), x_L.shape)
    codes = jnp.zeros(x_L.shape, jnp.int32)
    for tier in _tiers(signed):
        # Rounded up at the end of a tier it becomes the first of the next.
        noise = (random_L & ((1 << tier.dropped) - 1)).astype(jnp.int32)
        code = tier.first_code + ((above - tier.start + noise) >> tier.dropped)
        codes = jnp.where(above >= tier.start, code, codes)
    codes = jnp.where(bits == 0, 0, jnp.maximum(codes, 0 if signed else 1))
    return (codes | jnp.where(x_L < 0, 128, 0) if signed else codes).astype(jnp.uint8)


def from_codes(codes_L: jax.Array, exponents_K: jax.Array, *, signed: bool) -> jax.Array:
    """Decode codes, uint8 [..., L], by the exponents of their blocks, uint8 [..., K], to float32 [..., L]."""
    codes = codes_L.astype(jnp.int32)
    magnitudes = codes & 127 if signed else codes
    above = jnp.zeros(codes.shape, jnp.int32)
    for tier in _tiers(signed):
        here = tier.start + ((magnitudes - tier.first_code) << tier.dropped)
        above = jnp.where(magnitudes >= tier.first_code, here, above)
    bits = above + _per_element(_lowest(exponents_K, signed), codes.shape)
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
    """The tiers from the lowest on; code 0 is the number 0."""
    found, start, code = [], 0, 1
    for octaves, dropped in zip(_OCTAVES["signed" if signed else "unsigned"][::-1], _DROPPED[::-1], strict=True):
        found.append(_Tier(dropped, start, code))
        start += octaves << _MANTISSA
        code += octaves << (_MANTISSA - dropped)
    return found


def _lowest(exponents_K: jax.Array, signed: bool) -> jax.Array:
    """Bits of the lowest number that a block has a code for; negative where that is below every float32."""
    octaves = sum(_OCTAVES["signed" if signed else "unsigned"])
    return (exponents_K.astype(jnp.int32) + 1 - octaves) << _MANTISSA


def _bits(x: jax.Array) -> jax.Array:
    """The bits of the magnitudes: uint32."""
    return jax.lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)


def _per_element(blocks_K: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeat one number per block [..., K] for each of its elements: [..., L]."""
    block = shape[-1] // blocks_K.shape[-1]
    return jnp.broadcast_to(blocks_K[..., None], (*blocks_K.shape, block)).reshape(shape)


def round_to_bfloat16(x: jax.Array, random: jax.Array) -> jax.Array:
    """Round float32 to bfloat16, up with the probability that keeps the mean; `random`: uniform uint32 of its shape."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (random & ((1 << _BFLOAT16_DROPPED) - 1))
    # The head of the bits is the number: no second rounding.
    return jax.lax.bitcast_convert_type((bits >> _BFLOAT16_DROPPED).astype(jnp.uint16), jnp.bfloat16)


def random_bits(shape: tuple[int, ...], count: jax.Array, number: int) -> jax.Array:
    """Draw uniform uint32 for one rounding of a whole array: a hash of each element's place, alike on every layout.

    A multiplicative hash (the finalizer of MurmurHash3) costs a tenth of threefry and rounding asks for no more. It
    depends on the updates done (`count`, int32 []) and the number of the array among those that are rounded.
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
