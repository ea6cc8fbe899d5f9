"""How the next token of a text is chosen: the settings, and the choice for rows that have each their own.

Shapes: S rows, V vocabulary, T alternatives that are reported.
"""

import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import ConfigError

# Sums of probabilities are at least this, which is not zero on devices that flush smaller float32 numbers.
_TINY = float(np.finfo(np.float32).tiny)
# Smallest and largest number of each setting.
_RANGES = {
    "temperature": (0.0, 1e6),
    "top_k": (1, 2**31 - 1),
    "top_p": (1e-30, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


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
        for name, (lowest, highest) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not lowest <= value <= highest:
                raise ConfigError(f"{name} is {value}; use a number from {lowest} to {highest}")

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
        top_k: float32; 0: all tokens.
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
    """Put the settings of rows into NumPy arrays.

    Args:
        samplings: of each row.
        seeds: of each row, taken modulo 2^32.
        rows: number of each row among those with its seed; None: 0 for each.
    """

    settings = []
    for sampling in samplings:
        settings.append(
            (
                sampling.temperature,
                sampling.top_k or 0,
                sampling.top_p or 1,
                sampling.min_p or 0,
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
        )
    columns = np.array(settings, np.float32).T
    seed = np.array([seed % 2**32 for seed in seeds], np.uint32)
    row = np.zeros_like(seed) if rows is None else np.array(rows, np.uint32)
    return RowSampling(*columns.copy(), seed=seed, row=row)


def choose_rows(
    logits_SV: jax.Array,
    rows: RowSampling,
    positions_S: jax.Array,
    *,
    prompt_counts_SV: jax.Array,
    output_counts_SV: jax.Array,
) -> jax.Array:
    """Choose the next token of each row.

    The random numbers of a row follow from its seed, its number among the rows with this seed, and the index of the
    token in its text: not from its neighbours. Of equal logits the one of the lower token ranks first.

    Args:
        logits_SV: float32.
        rows: how each row is sampled.
        positions_S: int32, index of the chosen token in the row's text (the prompt's length for the first one).
        prompt_counts_SV: int32, how often the prompt has each token; not read for a row without penalties.
        output_counts_SV: int32, how often the output has each token; not read for a row without penalties.

    Returns:
        int32 [S].
    """
    logits_SV = _penalized(logits_SV.astype(jnp.float32), rows, prompt_counts_SV, output_counts_SV)
    greedy_S = jnp.argmax(logits_SV, axis=-1).astype(jnp.int32)
    is_sampled_S = rows.temperature > 0

    def draw() -> jax.Array:
        # The largest becomes 0 before the division: a small temperature can then reach -inf, which is probability 0.
        temperature_S1 = jnp.where(is_sampled_S, rows.temperature, 1.0)[:, None]
        scaled_SV = (logits_SV - logits_SV.max(axis=-1, keepdims=True)) / temperature_S1
        is_restricted_S = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
        scaled_SV = jax.lax.cond(
            jnp.any(is_sampled_S & is_restricted_S), lambda: _restricted(scaled_SV, rows), lambda: scaled_SV
        )
        noise = functools.partial(_gumbel, count=scaled_SV.shape[-1])
        noise_SV = jax.vmap(noise)(rows.seed, rows.row, positions_S)
        sampled_S = jnp.argmax(scaled_SV + noise_SV, axis=-1).astype(jnp.int32)
        return jnp.where(is_sampled_S, sampled_S, greedy_S)

    return jax.lax.cond(jnp.any(is_sampled_S), draw, lambda: greedy_S)


def log_probabilities_of(logits_SV: jax.Array, tokens_S: jax.Array, top: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute log-probabilities of the chosen tokens and of the most likely ones, before temperature and penalties.

    Returns:
        float32 [S] of the tokens, and of the T most likely tokens, in falling order, ids int32 [S, T] and
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
    """Return the logits after the penalties of tokens that a row has."""
    has_token_SV = prompt_counts_SV + output_counts_SV > 0
    factor_S1 = rows.repetition[:, None]
    repeated_SV = jnp.where(logits_SV > 0, logits_SV / factor_S1, logits_SV * factor_S1)
    logits_SV = jnp.where(has_token_SV, repeated_SV, logits_SV)
    presence_SV = rows.presence[:, None] * (output_counts_SV > 0)
    frequency_SV = rows.frequency[:, None] * output_counts_SV.astype(jnp.float32)
    return logits_SV - presence_SV - frequency_SV


def _gumbel(seed: jax.Array, row: jax.Array, position: jax.Array, *, count: int) -> jax.Array:
    """Draw Gumbel noise for one token of one row: the largest of logits and noise is a draw from their softmax.

    The row's number is folded in: if it were added, row 1 of one seed would be row 0 of the next. The generator is
    named, because the process may have another default, whose numbers may depend on neighbours.
    """
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), row)
    return jax.random.gumbel(jax.random.fold_in(key, position), (count,), jnp.float32)


def _restricted(scaled_SV: jax.Array, rows: RowSampling) -> jax.Array:
    """Return the logits, whose largest is 0, with -inf for every token that a row's settings exclude."""
    order_SV = _ordered_bits(scaled_SV)
    has_top_k_S = (rows.top_k > 0) & (rows.top_k < scaled_SV.shape[-1])
    ones_SV = jnp.ones_like(scaled_SV)
    is_kept_SV = _most_likely(has_top_k_S, order_SV, ones_SV, rows.top_k)
    # `top_p` is of the probabilities among what `top_k` left, `min_p` of the largest one, which always stays.
    weights_SV = jnp.where(is_kept_SV, jnp.exp(scaled_SV), 0.0)
    is_kept_SV &= weights_SV >= rows.min_p[:, None]
    limit_S = rows.top_p * weights_SV.sum(axis=-1)
    is_kept_SV &= _most_likely(rows.top_p < 1, order_SV, weights_SV, limit_S)
    return jnp.where(is_kept_SV, scaled_SV, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Turn float32 numbers into unsigned integers of the same order; both zeros are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _most_likely(is_limited_S: jax.Array, order_SV: jax.Array, weights_SV: jax.Array, limit_S: jax.Array) -> jax.Array:
    """Mark, from the largest down, the tokens before which the weights sum to less than the limit.

    The smallest of them is found bit by bit, in 32 sums over the vocabulary: a sort takes several times as long, and
    its time grows faster with the vocabulary.

    Args:
        is_limited_S: bool, whether the row has this limit; else all its tokens are marked.
        order_SV: uint32, larger for larger logits.
        weights_SV: float32, of each token.
        limit_S: float32; the first token always stays.

    Returns:
        bool [S, V].
    """
    limit_S = jnp.maximum(limit_S, _TINY)

    def weight_of(mask_SV: jax.Array) -> jax.Array:
        return jnp.where(mask_SV, weights_SV, 0).sum(axis=-1)

    def with_next_bit(step: jax.Array, smallest_S: jax.Array) -> jax.Array:
        raised_S = smallest_S | jnp.uint32(1) << (31 - step).astype(jnp.uint32)
        return jnp.where(weight_of(order_SV >= raised_S[:, None]) >= limit_S, raised_S, smallest_S)

    def marked() -> jax.Array:
        smallest_S = jax.lax.fori_loop(0, 32, with_next_bit, jnp.zeros(order_SV.shape[0], jnp.uint32))
        is_above_SV = order_SV > smallest_S[:, None]
        equal_weights_SV = jnp.where(order_SV == smallest_S[:, None], weights_SV, 0)
        before_SV = jnp.cumsum(equal_weights_SV, axis=-1) - equal_weights_SV
        is_within_SV = weight_of(is_above_SV)[:, None] + before_SV < limit_S[:, None]
        is_marked_SV = is_above_SV | ((order_SV == smallest_S[:, None]) & is_within_SV)
        return is_marked_SV | ~is_limited_S[:, None]

    return jax.lax.cond(jnp.any(is_limited_S), marked, lambda: jnp.ones(order_SV.shape, bool))
