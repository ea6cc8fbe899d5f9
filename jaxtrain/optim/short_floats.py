"""Floats of 8 bits in blocks that share an exponent (block-wise quantization, Dettmers et al. 2021).

A code is a short float relative to the largest number of its block. As in the table of Dettmers et al., small numbers
are coarser: octaves near the largest have 16 codes, later ones 8, the last 4. Codes with a sign reach from the largest
of the block 14 octaves down, codes without one 31 octaves. These never fall to 0: an element with a first moment and no
second would explode. Nothing here is arithmetic on floats, so that codes are the same on every layout and machine that
computes the same numbers.

Shapes: L elements of the last dim, K of its blocks. The other dims are any.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_MANTISSA = 23
# Octaves below the largest of a block that drop 19, 20 and 21 bits of the mantissa, so have 16, 8 and 4 codes.
_DROPPED = (19, 20, 21)
_OCTAVES = {"signed": (4, 5, 5), "unsigned": (8, 8, 15)}  # 124 codes and a sign, 252 codes


def largest_exponents(x_L: jax.Array, block: int) -> jax.Array:
    """Find the exponent that the largest number of each block can be rounded up to.

    Args:
        x_L: float32 [..., L].
        block: elements of a block; it divides L.

    Returns:
        uint8 [..., K].
    """
    bits = _bits(x_L).reshape(*x_L.shape[:-1], x_L.shape[-1] // block, block)
    # Bits of positive floats are in the order of the floats.
    return ((jnp.max(bits, axis=-1) + ((1 << _DROPPED[0]) - 1)) >> _MANTISSA).astype(jnp.uint8)


def to_codes(x_L: jax.Array, exponents_K: jax.Array, random_L: jax.Array, *, signed: bool) -> jax.Array:
    """Round numbers to codes, up with the probability that keeps the mean.

    Args:
        x_L: float32 [..., L]; nothing negative unless `signed`.
        exponents_K: uint8 [..., K], from `largest_exponents`.
        random_L: uint32 [..., L], uniform.
        signed: which of the two sets of codes.

    Returns:
        uint8 [..., L].
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
    """Decode codes.

    Args:
        codes_L: uint8 [..., L].
        exponents_K: uint8 [..., K].
        signed: which of the two sets of codes.

    Returns:
        float32 [..., L].
    """
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
