"""Rotary positions: by how much queries and keys are rotated, and the rotation.

Shapes: B batch, L length, H heads, K head_dim, R rotated dims of a head.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.model import AnyRope, LinearRope, LongRope, RopeScaling, TransformerConfig, YarnRope
from jaxtrain.interop.formats.rope import longrope_factor
from jaxtrain.layout.sharding import constrain
from jaxtrain.ops.ranks import aligned


def rotary_frequencies(dims: int, theta: float, scaling: AnyRope | None, *, length: int = 1) -> jax.Array:
    """Compute by how much each pair of dims is rotated per position.

    Source: Su et al. 2021; of the scalings, see `config/rope.py`.

    Args:
        dims: rotated dims of a head.
        theta: base of the frequencies.
        scaling: for sequences longer than those of the first training; None: no scaling.
        length: positions of the sequence, or of the cache; longrope has other factors for more than the original ones.

    Returns:
        Radians per position, float32 [dims / 2].
    """
    frequencies = theta ** (-jnp.arange(0, dims, 2, dtype=jnp.float32) / dims)
    match scaling:
        case None:
            return frequencies
        case RopeScaling():
            wavelengths = 2 * math.pi / frequencies
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            ramp = jnp.clip((scaling.original_length / wavelengths - low) / (high - low), 0.0, 1.0)
            return frequencies * (ramp + (1 - ramp) / scaling.factor)
        case LinearRope():
            return frequencies / scaling.factor
        case YarnRope():
            kept = _yarn_kept(dims, theta, scaling)
            return frequencies * (kept + (1 - kept) / scaling.factor)
        case LongRope():
            long = length > scaling.original_length
            return frequencies / np.asarray(scaling.long_factors if long else scaling.short_factors, np.float32)


def _yarn_kept(dims: int, theta: float, scaling: YarnRope) -> np.ndarray:
    """The share of each frequency that stays as it is: 1 for many rotations, 0 for few, float32 [dims / 2]."""

    def dim_of(rotations: float) -> float:
        """The pair of dims that rotates so often over the original length."""
        return dims * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    # A ramp of no width would divide by zero.
    width = last - first or 0.001
    return 1 - np.clip((np.arange(dims // 2, dtype=np.float32) - first) / width, 0, 1)


def rotary_factor(scaling: AnyRope | None, *, max_length: int) -> float:
    """The factor of cos and sin, and so of the rotated dims of queries and keys.

    Args:
        scaling: of the frequencies; yarn and longrope have a factor.
        max_length: positions of the model.
    """
    match scaling:
        case YarnRope() if scaling.attention_factor is None:
            return 0.1 * math.log(scaling.factor) + 1
        case LongRope() if scaling.attention_factor is None:
            return longrope_factor(scaling.original_length, max_length)
        case YarnRope() | LongRope():
            assert scaling.attention_factor is not None
            return scaling.attention_factor
        case _:
            return 1.0


def rotate(x_BLHK: jax.Array, positions_BL: jax.Array, frequencies: jax.Array, *, factor: float = 1.0) -> jax.Array:
    """Apply the rotary position embedding to queries or keys; the first half of the dims is paired with the second.

    Args:
        x_BLHK: queries or keys, any float dtype; the rotation is computed in float32.
        positions_BL: positions of the tokens, integers; a batch of 1 serves all rows.
        frequencies: radians per position, float32 [R / 2], or [B, L, R / 2] where tokens have their own; the first R
            of K dims are rotated, the others stay.
        factor: of cos and sin.

    Returns:
        [B, L, H, K] in the dtype of x_BLHK.
    """
    dims = 2 * frequencies.shape[-1]
    if dims < x_BLHK.shape[-1]:
        rotated = rotate(x_BLHK[..., :dims], positions_BL, frequencies, factor=factor)
        return jnp.concatenate([rotated, x_BLHK[..., dims:]], axis=-1)
    positions_BL1 = positions_BL[..., None].astype(jnp.float32)
    angles = positions_BL1 * aligned(frequencies, positions_BL1)  # [B, L, R / 2]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BLHK.dtype)


def model_frequencies(
    config: TransformerConfig, local: jax.Array | None, *, length: int, long_BL: jax.Array | None = None
) -> jax.Array:
    """The frequencies of a layer of a transformer.

    Args:
        config: of the model.
        local: whether the layer is a local one, bool []; None: the model has none.
        length: positions of the sequence, or of the cache.
        long_BL: from `long_documents`; None: all tokens are in sequences of `length`.

    Returns:
        Radians per position, float32 [R / 2], or [B, L, R / 2] with `long_BL`.
    """

    def scaled(length: int) -> jax.Array:
        return rotary_frequencies(config.rotary_dims, config.rope_theta, config.rope_scaling, length=length)

    frequencies = scaled(length)
    if long_BL is not None:
        frequencies = jnp.where(long_BL[..., None], frequencies, scaled(1))
    if local is None or config.local_layers is None or config.local_layers.rope_theta is None:
        return frequencies
    own = rotary_frequencies(config.rotary_dims, config.local_layers.rope_theta, None)
    return jnp.where(local, own, frequencies)


def long_documents(scaling: AnyRope | None, positions_BL: jax.Array, segments_BL: jax.Array | None) -> jax.Array | None:
    """Find the tokens that longrope rotates by its long factors: those of documents longer than the original length.

    The length of a document is its largest position plus one, so that in a packed or padded row it has the factors that
    it has alone. Positions count up by one within a document.

    Args:
        scaling: of the frequencies.
        positions_BL: positions of the tokens in their documents; a batch of 1 serves all rows.
        segments_BL: numbers of the documents of packed rows, and 0 for padding; None: every row is one document.

    Returns:
        bool [B, L]; None where all tokens of the rows have the same factors, which the length of the row says.
    """
    if segments_BL is None or not isinstance(scaling, LongRope) or segments_BL.shape[1] <= scaling.original_length:
        return None
    with jax.named_scope("long_documents"):
        # A document is long if it has a token at position `original_length`: for each token, as far behind it as it is
        # before that position. Scans along a sharded sequence would send its parts to and fro in stages of a pipeline.
        length = segments_BL.shape[1]
        positions_BL = jnp.broadcast_to(positions_BL, segments_BL.shape)
        left_BL = scaling.original_length - positions_BL
        there_BL = jnp.arange(length) + jnp.maximum(left_BL, 0)
        whole_BL = constrain(segments_BL, "batch", None)
        found_BL = jnp.take_along_axis(whole_BL, jnp.minimum(there_BL, length - 1), axis=1)
        long_BL = (left_BL <= 0) | ((there_BL < length) & (found_BL == segments_BL))
        return constrain(long_BL & (segments_BL != 0), "batch", "sequence")
