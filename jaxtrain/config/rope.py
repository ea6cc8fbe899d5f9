"""How rotary frequencies are scaled for contexts longer than those of the first training. No jax here."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxtrain.config.base import Group
from jaxtrain.config.numbers import Length, Scale

_Factor = Annotated[float, Field(ge=1, le=1e6)]


class RopeScaling(Group):
    """Scaling of Llama 3.1: low frequencies are divided by the factor, high ones are kept, a ramp joins the two."""

    kind: Literal["llama3"] = "llama3"
    """Which scaling this group describes."""
    factor: _Factor
    """Low frequencies are divided by this."""
    low_frequency_factor: Scale = 1.0
    """Frequencies with wavelengths above original_length / low_frequency_factor are divided by factor."""
    high_frequency_factor: Scale = 4.0
    """Frequencies with wavelengths below original_length / high_frequency_factor are not scaled."""
    original_length: Length = 8192
    """Sequence length that the model was first trained at."""

    @model_validator(mode="after")
    def _ramp_rises(self) -> "RopeScaling":
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor {self.low_frequency_factor} is not between 0 and high_frequency_factor "
                f"{self.high_frequency_factor}; Llama 3.1 has 1 and 4"
            )
        return self


class LinearRope(Group):
    """Position interpolation (Chen et al. 2023): all frequencies are divided by the factor."""

    kind: Literal["linear"] = "linear"
    """Which scaling this group describes."""
    factor: _Factor
    """All frequencies are divided by this."""


class YarnRope(Group):
    """YaRN (Peng et al. 2023): frequencies of few rotations are divided by the factor, and cos and sin are scaled."""

    kind: Literal["yarn"] = "yarn"
    """Which scaling this group describes."""
    factor: _Factor
    """Frequencies of few rotations are divided by this."""
    original_length: Length
    """Sequence length that the model was first trained at."""
    beta_fast: Scale = 32.0
    """Dims that rotate more often than this over original_length keep their frequency."""
    beta_slow: Scale = 1.0
    """Dims that rotate less often than this over original_length are divided by factor."""
    attention_factor: Scale | None = None
    """Factor of cos and sin; null: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Round the dims at which the ramp begins and ends to whole numbers."""


class LongRope(Group):
    """LongRoPE (Ding et al. 2024): each frequency has a divisor of its own, for short and for long sequences."""

    kind: Literal["longrope"] = "longrope"
    """Which scaling this group describes."""
    short_factors: Annotated[tuple[Scale, ...], Field(strict=False, min_length=1)]
    """Divisors of the frequencies for sequences up to original_length, one for each pair of dims."""
    long_factors: Annotated[tuple[Scale, ...], Field(strict=False, min_length=1)]
    """Divisors of the frequencies for longer sequences."""
    original_length: Annotated[int, Field(ge=2, le=2**24)]
    """Sequence length that the model was first trained at."""
    attention_factor: Scale | None = None
    """Factor of cos and sin; null: sqrt(1 + ln(s) / ln(o)), o original_length and s max_sequence_length / o."""

    @model_validator(mode="after")
    def _equally_many(self) -> "LongRope":
        if len(self.short_factors) != len(self.long_factors):
            raise ValueError(
                f"short_factors has {len(self.short_factors)} entries, long_factors {len(self.long_factors)}; "
                "give one of each for every pair of dims"
            )
        return self


AnyRope = Annotated[RopeScaling | LinearRope | YarnRope | LongRope, Field(discriminator="kind")]


def with_default_kind(values: object) -> object:
    """The values of a scaling with the kind that they mean where they name none: that of Llama 3.1."""
    return {"kind": "llama3", **values} if isinstance(values, dict) and "kind" not in values else values
