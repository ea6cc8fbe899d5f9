"""How the next token of a text is chosen: the settings, and the choice for rows that have each their own.

Shapes: S rows, V vocabulary, T alternatives that are reported.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import ConfigError

# Devices flush smaller float32 numbers to zero, and a division by zero has no largest logit.
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    The logits are changed in this order: penalties, then the temperature, then `top_k`, `top_p` and
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

    def __post_init__(self) -> None:
        top_k, top_p, min_p = self.top_k, self.top_p, self.min_p
        table = (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or a finite number above it"),
            ("top_k", top_k is None or (top_k >= 1 and top_k == int(top_k)), "a whole number of 1 or more"),
            ("top_p", top_p is None or 0 < top_p <= 1, "a number above 0, up to 1"),
            ("min_p", min_p is None or 0 <= min_p <= 1, "a number from 0 to 1"),
            ("repetition_penalty", _TINY <= self.repetition_penalty < math.inf, "a finite number above 0"),
            ("presence_penalty", abs(self.presence_penalty) <= 2, "a number from -2 to 2"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2, "a number from -2 to 2"),
        )
        for name, fits, use in table:
            if not fits:
                raise ConfigError(f"{name} is {getattr(self, name)}; use {use}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without a random number."""
        return self.temperature < _TINY

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty needs to know which tokens the text has."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSampling:
    """What `Sampling` says, for each row: arrays [S], of NumPy or jax.

    Attributes:
        temperature: float32; 0 is greedy.
        top_k: int32; 0: all tokens.
        top_p: float32, above 0; 1: all tokens.
        min_p: float32; 0: all tokens.
        repetition: float32; 1: no penalty.
        presence: float32; 0: no penalty.
        frequency: float32; 0: no penalty.
        seed: uint32, of the row's random numbers.
        row: uint32, which of the rows with this seed it is.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition: Any
    presence: Any
    frequency: Any
    seed: Any
    row: Any


def row_sampling(samplings: Sequence[Sampling], seeds: Sequence[int], rows: Sequence[int] | None = None) -> RowSampling:
    """The arrays, of NumPy, for rows with these settings, seeds (taken modulo 2^32) and numbers; None: 0 for each."""

    def floats(values: Sequence[float]) -> np.ndarray:
        return np.array(values, np.float32)

    return RowSampling(
        temperature=floats([0.0 if one.is_greedy else one.temperature for one in samplings]),
        top_k=np.array([min(one.top_k or 0, 2**31 - 1) for one in samplings], np.int32),
        # A top_p that float32 rounds to 0 would leave no token.
        top_p=np.maximum(floats([1.0 if one.top_p is None else one.top_p for one in samplings]), np.float32(_TINY)),
        min_p=floats([one.min_p or 0.0 for one in samplings]),
        repetition=floats([one.repetition_penalty for one in samplings]),
        presence=floats([one.presence_penalty for one in samplings]),
        frequency=floats([one.frequency_penalty for one in samplings]),
        seed=np.array([int(seed) % 2**32 for seed in seeds], np.uint32),
        row=np.array(rows or [0] * len(seeds), np.uint32),
    )


def choose_rows(
    logits_SV: jax.Array,
    rows: RowSampling,
    positions_S: jax.Array,
    *,
    prompt_counts_SV: jax.Array | None,
    output_counts_SV: jax.Array | None,
) -> jax.Array:
    """The next token of each row.

    The random numbers of a row follow from its seed, its number among the rows with this seed, and the index of the
    token in its text: not from its neighbours. Of equal logits the one of the lower token ranks first.

    Args:
        logits_SV: float32.
        rows: how each row is sampled.
        positions_S: int32, index of the chosen token in the row's text (the prompt's length for the first one).
        prompt_counts_SV: int32, how often the prompt has each token; None: no row has a penalty.
        output_counts_SV: int32, how often the output has each token; None: no row has a penalty.

    Returns:
        int32 [S].
    """
    logits_SV = logits_SV.astype(jnp.float32)
    if prompt_counts_SV is not None and output_counts_SV is not None:
        logits_SV = _penalized(logits_SV, rows, prompt_counts_SV, output_counts_SV)
    greedy_S = jnp.argmax(logits_SV, axis=-1).astype(jnp.int32)
    sampled = rows.temperature > 0

    def draw() -> jax.Array:
        # The largest becomes 0 before the division: a small temperature can then reach -inf, which is probability 0.
        heat_S1 = jnp.where(sampled, rows.temperature, 1.0)[:, None]
        scaled_SV = (logits_SV - logits_SV.max(axis=-1, keepdims=True)) / heat_S1
        restricted = sampled & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
        scaled_SV = jax.lax.cond(jnp.any(restricted), lambda x: _restricted(x, rows), lambda x: x, scaled_SV)
        noise_SV = jax.vmap(functools.partial(_gumbel, count=scaled_SV.shape[-1]))(rows.seed, rows.row, positions_S)
        return jnp.where(sampled, jnp.argmax(scaled_SV + noise_SV, axis=-1).astype(jnp.int32), greedy_S)

    return jax.lax.cond(jnp.any(sampled), draw, lambda: greedy_S)


def log_probabilities_of(logits_SV: jax.Array, tokens_S: jax.Array, top: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of the chosen tokens and of the most likely ones, before temperature and penalties.

    Returns float32 [S] of the tokens, and of the T most likely tokens, in falling order, ids int32 [S, T] and
    log-probabilities float32 [S, T].
    """
    logits_SV = logits_SV.astype(jnp.float32)
    log_total_S1 = jax.nn.logsumexp(logits_SV, axis=-1, keepdims=True)
    chosen_S1 = jnp.take_along_axis(logits_SV, tokens_S[:, None], axis=-1)
    values_ST, ids_ST = jax.lax.top_k(logits_SV, min(top, logits_SV.shape[-1]))
    return (chosen_S1 - log_total_S1)[:, 0], ids_ST.astype(jnp.int32), values_ST - log_total_S1


def _penalized(
    logits_SV: jax.Array, rows: RowSampling, prompt_counts_SV: jax.Array, output_counts_SV: jax.Array
) -> jax.Array:
    """The logits after the penalties of tokens that a row has."""
    seen_SV = prompt_counts_SV + output_counts_SV > 0
    factor_S1 = rows.repetition[:, None]
    weaker_SV = jnp.where(logits_SV > 0, logits_SV / factor_S1, logits_SV * factor_S1)
    logits_SV = jnp.where(seen_SV, weaker_SV, logits_SV)
    presence_SV = rows.presence[:, None] * (output_counts_SV > 0)
    return logits_SV - presence_SV - rows.frequency[:, None] * output_counts_SV.astype(jnp.float32)


def _gumbel(seed: jax.Array, row: jax.Array, position: jax.Array, *, count: int) -> jax.Array:
    """Gumbel noise of one token of one row: the largest of logits and noise is a draw from their softmax.

    The row's number is folded in: if it were added, row 1 of one seed would be row 0 of the next. The generator is
    named, because the process may have another default, whose numbers may depend on neighbours.
    """
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), row)
    return jax.random.gumbel(jax.random.fold_in(key, position), (count,), jnp.float32)


def _restricted(scaled_SV: jax.Array, rows: RowSampling) -> jax.Array:
    """The logits, whose largest is 0, with -inf for every token that `top_k`, `top_p` or `min_p` excludes."""
    whole = scaled_SV.shape[-1]
    order_SV = _ordered_bits(scaled_SV)
    top_k = (rows.top_k > 0) & (rows.top_k < whole)
    kept_SV = jax.lax.cond(
        jnp.any(top_k),
        lambda: ~top_k[:, None] | _most_likely(order_SV, jnp.ones_like(scaled_SV, jnp.int32), rows.top_k, jnp.int32(1)),
        lambda: jnp.ones(scaled_SV.shape, bool),
    )
    # `top_p` is of the probabilities among what `top_k` left, `min_p` of the largest one, which always stays.
    weights_SV = jnp.where(kept_SV, jnp.exp(scaled_SV), 0.0)
    kept_SV &= (weights_SV >= rows.min_p[:, None]) | (rows.min_p <= 0)[:, None]
    top_p = rows.top_p < 1
    total_S = weights_SV.sum(axis=-1)
    kept_SV &= jax.lax.cond(
        jnp.any(top_p),
        lambda: ~top_p[:, None] | _most_likely(order_SV, weights_SV, rows.top_p * total_S, jnp.float32(_TINY)),
        lambda: jnp.ones(scaled_SV.shape, bool),
    )
    return jnp.where(kept_SV, scaled_SV, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order of float32 numbers; both zeros are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _most_likely(order_SV: jax.Array, weights_SV: jax.Array, limit_S: jax.Array, least: jax.Array) -> jax.Array:
    """Marks, from the largest down, the tokens before which the weights sum to less than the limit: bool [S, V].

    The smallest of them is found bit by bit, in 32 sums over the vocabulary: a sort takes several times as long, and
    its time grows faster with the vocabulary. With the limit `least` the first token alone stays.
    """
    limit_S = jnp.maximum(limit_S, least)

    def sum_of(mask_SV: jax.Array) -> jax.Array:
        return jnp.where(mask_SV, weights_SV, 0).sum(axis=-1)

    def narrower(step: jax.Array, smallest_S: jax.Array) -> jax.Array:
        wanted_S = smallest_S | jnp.uint32(1) << (31 - step).astype(jnp.uint32)
        return jnp.where(sum_of(order_SV >= wanted_S[:, None]) >= limit_S, wanted_S, smallest_S)

    smallest_S = jax.lax.fori_loop(0, 32, narrower, jnp.zeros(order_SV.shape[0], jnp.uint32))
    above_SV, equal_SV = order_SV > smallest_S[:, None], order_SV == smallest_S[:, None]
    before_SV = jnp.cumsum(jnp.where(equal_SV, weights_SV, 0), axis=-1) - jnp.where(equal_SV, weights_SV, 0)
    return above_SV | (equal_SV & (sum_of(above_SV)[:, None] + before_SV < limit_S[:, None]))
