"""Settings of attention (rotary frequencies, temperature, local layers, latents) and of state spaces. No jax here."""

import json
from typing import Annotated, Literal

from pydantic import Field

from jaxtrain.config.base import Flags, Group, Positive, PositiveInt, Ratio

_Factor = Annotated[float, Field(ge=1, le=1e6)]
Factors = Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)]


class RopeScaling(Group):
    """Scaling of Llama 3.1: low frequencies are divided by the factor, high ones are kept, with a ramp between."""

    kind: Literal["llama3"] = "llama3"
    factor: _Factor
    """Low frequencies are divided by this."""
    low_frequency_factor: Positive = 1.0
    """Frequencies with wavelengths above original_length / low_frequency_factor are divided by factor."""
    high_frequency_factor: Positive = 4.0
    """Frequencies with wavelengths below original_length / high_frequency_factor are not scaled."""
    original_length: PositiveInt = 8192
    """Sequence length of the original pretraining."""


class LinearRope(Group):
    """Position interpolation (Chen et al. 2023): all frequencies are divided by the factor."""

    kind: Literal["linear"] = "linear"
    factor: _Factor
    """All frequencies are divided by this."""


class YarnRope(Group):
    """YaRN (Peng et al. 2023): low frequencies are divided by the factor, and cos and sin are scaled."""

    kind: Literal["yarn"] = "yarn"
    factor: _Factor
    """Low frequencies are divided by this."""
    original_length: PositiveInt
    """Sequence length of the original pretraining."""
    beta_fast: Positive = 32.0
    """Dims that rotate more often than this over original_length keep their frequency."""
    beta_slow: Positive = 1.0
    """Dims that rotate less often than this over original_length are divided by factor."""
    attention_factor: Positive | None = None
    """Factor of cos and sin; null: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Round the dims at which the ramp begins and ends to whole numbers."""


class LongRope(Group):
    """LongRoPE (Ding et al. 2024): each frequency has its own divisor, one for short and one for long sequences."""

    kind: Literal["longrope"] = "longrope"
    short_factors: Factors
    """Divisors of the frequencies for sequences up to original_length, one for each pair of dims."""
    long_factors: Factors
    """Divisors of the frequencies for longer sequences."""
    original_length: Annotated[int, Field(ge=2, le=10**9)]
    """Sequence length of the original pretraining."""
    attention_factor: Positive | None = None
    """Factor of cos and sin; null: sqrt(1 + ln(s) / ln(o)), o original_length and s max_sequence_length / o."""


AnyRope = Annotated[RopeScaling | LinearRope | YarnRope | LongRope, Field(discriminator="kind")]


class AttentionTemperature(Group):
    """Growth of queries for long contexts (Llama 4), at position p by 1 + scale ln(1 + floor((p + 1) / step))."""

    scale: Positive = 0.1
    """Factor of the logarithm."""
    step: PositiveInt = 8192
    """Positions over which queries do not grow."""


class LocalLayers(Group):
    """Layers with sliding-window attention between layers with full attention (Gemma 2 and 3)."""

    pattern: Flags
    """1 for a local layer, 0 for a global one; repeated from the first layer to the last."""
    window: PositiveInt
    """Positions that a local layer attends to, up to its own, and as many ahead if not causal."""
    chunked: bool = False
    """Attend to the positions of the own chunk of `window` instead, counted from the start of a text (Llama 4)."""
    rope_theta: Positive | None = None
    """Base of the (unscaled) rotary frequencies of local layers; null: as in the global layers."""


class LatentConfig(Group):
    """Multi-head latent attention (DeepSeek V2): keys and values, and queries, are made of small normalized vectors."""

    query_rank: PositiveInt | None = None
    """Width of the vector that a token's queries are made of; null: queries are made of the residual stream."""
    key_value_rank: PositiveInt
    """Width of the vector that a token's keys and values are made of."""
    nope_dim: PositiveInt
    """Dims of a head's queries and keys without positions."""
    rope_dim: PositiveInt
    """Dims of a head's queries and keys that are rotated; all heads share those of the key."""
    value_dim: PositiveInt
    """Dims of a head's values."""
    norm_epsilon: Ratio = 1e-6
    """Added to the variance in the norms of these vectors."""


# The keys of a model group that say something of a block with a state space.
_OF_STATE_SPACE = (
    *("kind", "from", "size", "num_layers", "embed_dim", "num_heads", "head_dim", "vocab_size", "max_sequence_length"),
    *("norm", "norm_epsilon", "norm_offset", "norm_bias", "residual_scale", "dropout", "tie_embeddings", "output_bias"),
    *("embedding_scale", "embedding_width", "token_types", "logits_scale", "logits_softcap", "head", "state_space"),
)


class StateSpaceConfig(Group):
    """Mamba 2 (Dao and Gu 2024): a block is a norm and a state space of num_heads heads of width head_dim, no MLP."""

    state_dim: PositiveInt = 128
    """Numbers that a head keeps of the earlier tokens, for each of the head_dim numbers of its input."""
    groups: PositiveInt = 1
    """Number of groups of heads that share what is written to the state and read from it (B and C)."""
    conv_width: Annotated[int, Field(ge=2, le=64)] = 4
    """Tokens, up to the own one, that the causal convolution before the state sums over."""
    chunk: PositiveInt = 256
    """Tokens that are multiplied as in attention, between two states; it changes the speed, and no result."""

    def check(self, model: Group, num_heads: int) -> None:
        """Raise where a model group with a state space sets a key of attention or MLP, or its groups do not divide."""
        usual = {name: (field.default,) for name, field in type(model).model_fields.items()}
        usual |= dict(position=("none",), num_kv_heads=(None, num_heads))
        wrong = [name for name in usual if name not in _OF_STATE_SPACE and getattr(model, name) not in usual[name]]
        if wrong:
            works = ", ".join(f"{name}: {json.dumps(usual[name][0])}".replace('"', "") for name in wrong)
            raise ValueError(f"a block with state_space has no attention and no MLP; set {works}")
        if num_heads % self.groups:
            raise ValueError(f"num_heads {num_heads} is not a multiple of state_space.groups {self.groups}")
