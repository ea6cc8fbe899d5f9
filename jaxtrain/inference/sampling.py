"""How the next token of a text is chosen. No jax here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from jaxtrain.errors import ConfigError

# Devices flush smaller float32 numbers to zero, and a division by zero has no largest logit.
SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)
_LARGEST_PENALTY = 2.0
_LARGEST_BIAS = 100.0


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    The logits are changed in this order: penalties and `logit_bias`, then the temperature, then `top_k`, `top_p` and
    `min_p`, each on what the one before it left.

    Attributes:
        temperature: 0 is greedy.
        top_k: only the k most likely tokens; None: all.
        top_p: only the most likely tokens whose probabilities sum to p (nucleus, Holtzman et al. 2019); None: all.
        min_p: only tokens of at least this share of the largest probability (Nguyen et al. 2024); None: all.
        repetition_penalty: positive logits of tokens of the prompt and the output are divided by it, negative ones
            multiplied (Keskar et al. 2019); 1: no penalty.
        presence_penalty: subtracted from the logits of tokens that the output has, -2 to 2.
        frequency_penalty: subtracted from the logit of a token once per time that the output has it, -2 to 2.
        logit_bias: (token, number from -100 to 100 that is added to its logit); a dict is taken too.

    Raises:
        ConfigError: a number is out of its range.

    Example:
        >>> greedy = jt.Sampling(temperature=0)
        >>> nucleus = jt.Sampling(temperature=0.7, top_p=0.9)
        >>> jt.Sampling(min_p=0.05, repetition_penalty=1.1).top_k is None
        True
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    _: KW_ONLY
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}; use 0 (greedy) or a finite number above it")
        if self.top_k is not None and (not is_number(self.top_k, Integral) or self.top_k < 1):
            raise ConfigError(f"top_k is {self.top_k}; use a whole number of 1 or more")
        if self.top_p is not None and (not is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ConfigError(f"top_p is {self.top_p}; use a number above 0, up to 1")
        if self.min_p is not None and (not is_number(self.min_p) or not 0 <= self.min_p <= 1):
            raise ConfigError(f"min_p is {self.min_p}; use a number from 0 to 1")
        penalty = self.repetition_penalty
        if not is_number(penalty) or not SMALLEST_TEMPERATURE <= penalty < math.inf:
            raise ConfigError(f"repetition_penalty is {penalty}; use a finite number above 0 (1: no penalty)")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not is_number(value) or not -_LARGEST_PENALTY <= value <= _LARGEST_PENALTY:
                raise ConfigError(f"{name} is {value}; use a number from -2 to 2 (0: no penalty)")
        # A frozen record that programs are kept by has to be hashable, whatever it was made of.
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without a random number."""
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty needs to know which tokens the text has."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def is_number(value: Any, kind: type = Real) -> bool:
    """Whether a value is a number of this kind; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _bias_pairs(given: Any) -> tuple[tuple[int, float], ...]:
    """The biases as pairs of a token and a number.

    Raises:
        ConfigError: something else, or a number out of range.
    """
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    write = "use pairs of a token id and a number from -100 to 100: ((50256, -100.0),)"
    if not isinstance(pairs, Sequence) or isinstance(pairs, str):
        raise ConfigError(f"logit_bias is {given!r:.60}; {write}")
    found = []
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ConfigError(f"logit_bias is {given!r:.60}; {write}")
        token, number = pair
        token_fits = is_number(token, Integral) and token >= 0
        if not token_fits or not is_number(number) or not -_LARGEST_BIAS <= number <= _LARGEST_BIAS:
            raise ConfigError(f"logit_bias is {given!r:.60}; {write}")
        found.append((int(token), float(number)))
    return tuple(found)
