"""The programs of the engine: a token for every slot, a chunk of one prompt, and a slot's penalties.

Shapes: S slots, W tokens fed to each (1, or 1 and a draft), C tokens of a chunk, V vocabulary, K alternatives.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.inference.choose import RowSampling, choose_rows, log_probabilities_of
from jaxtrain.inference.engine.cache_layout import CacheLayout
from jaxtrain.inference.engine.request import MOST_ALTERNATIVES
from jaxtrain.models.decoder import NOWHERE
from jaxtrain.models.model import Decoder, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """What the device holds of the slots; every program takes it over and gives it back.

    Attributes:
        cache: keys and values, as the decoder makes it.
        prompt_counts_SV: how often each token is in the prompt of a request with penalties, int32.
        output_counts_SV: how often each was emitted, int32; meaningless for a request without penalties.
        bias_SV: added to the logits, float32.
    """

    cache: Any
    prompt_counts_SV: Any
    output_counts_SV: Any
    bias_SV: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chosen:
    """Tokens with what is reported of them; on the host these are NumPy arrays.

    Attributes:
        tokens: ids, int32 [...].
        log_probabilities: float32 [...].
        top_ids: of the likeliest tokens, int32 [..., K]; zeros where nobody asked.
        top_log_probabilities: theirs, float32 [..., K].
    """

    tokens: Any
    log_probabilities: Any
    top_ids: Any
    top_log_probabilities: Any


def decode_slots(
    params: Params,
    state: SlotState,
    tokens_SW: jax.Array,
    positions_S: jax.Array,
    writes_S: jax.Array,
    rows: RowSampling,
    wants_top: jax.Array,
    *,
    decoder: Decoder,
) -> tuple[SlotState, Chosen]:
    """Feed every slot its last token (and a draft of the next ones), and choose what follows each token fed.

    A slot without a text that goes on is fed too, at positions that are not written.

    Args:
        params: in the compute dtype.
        state: of the slots.
        tokens_SW: int32; behind the last token of the text stands the draft, or anything.
        positions_S: of the first token of each row, int32; `NOWHERE` for a row whose tokens are not to be written.
        writes_S: whether the row has a text that goes on, bool.
        rows: how the token after the first is chosen. Those after a draft's are the likeliest.
        wants_top: whether anybody asked for alternatives, bool [].
        decoder: of the model.

    Returns:
        The state, and what was chosen: [S, W].
    """
    slots, width = tokens_SW.shape
    positions_SW = positions_S[:, None] + jnp.arange(width, dtype=jnp.int32)
    logits_SWV, cache = decoder.decode(params, tokens_SW, positions_SW, state.cache)
    first_S = choose_rows(
        logits_SWV[:, 0],
        rows,
        positions_S + 1,
        prompt_counts_SV=state.prompt_counts_SV,
        output_counts_SV=state.output_counts_SV,
        bias_SV=state.bias_SV,
    )
    drafted_SW = jnp.argmax(logits_SWV[:, 1:], axis=-1).astype(jnp.int32)
    chosen_SW = jnp.concatenate([first_S[:, None], drafted_SW], axis=1)
    counts_SV = state.output_counts_SV.at[jnp.arange(slots), first_S].add(writes_S.astype(jnp.int32))
    flat = _described(logits_SWV.reshape(slots * width, -1), chosen_SW.reshape(-1), wants_top)
    chosen = jax.tree.map(lambda leaf: leaf.reshape(slots, width, *leaf.shape[1:]), flat)
    return SlotState(cache, state.prompt_counts_SV, counts_SV, state.bias_SV), chosen


def prefill_chunk(
    params: Params,
    state: SlotState,
    slot: jax.Array,
    tokens_C: jax.Array,
    begin: jax.Array,
    count: jax.Array,
    is_last: jax.Array,
    row: RowSampling,
    wants_top: jax.Array,
    next_tokens_C: jax.Array,
    wants_prompt: jax.Array,
    *,
    decoder: Decoder,
    layout: CacheLayout,
) -> tuple[SlotState, Chosen, Chosen]:
    """Read a chunk of a prompt into a slot.

    Args:
        params: in the compute dtype.
        state: of the slots.
        slot: index, int32 [].
        tokens_C: of the prompt, padded on the right, int32. The padding is not written.
        begin: position of the first of them, int32 [].
        count: of tokens without padding, at least 1, int32 [].
        is_last: whether the prompt ends with it, bool [].
        row: how the token after the last is chosen, arrays [1].
        wants_top: whether the request asked for alternatives, bool [].
        next_tokens_C: the token of the prompt after each, int32.
        wants_prompt: whether the request asked for log-probabilities of its prompt, bool [].
        decoder: of the model.
        layout: of its cache.

    Returns:
        The state; what follows the chunk, [1], zeros where the prompt goes on; and what is reported of
        `next_tokens_C`, [C], zeros where the request did not ask.
    """
    own, order_C = layout.take(state.cache, slot), jnp.arange(tokens_C.shape[0], dtype=jnp.int32)
    positions_1C = jnp.where(order_C < count, begin + order_C, NOWHERE)[None]
    logits, own = _deferred(params, tokens_C[None], positions_1C, own, decoder)
    cache = layout.put(state.cache, own, slot)
    one = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=slot, slice_size=1)
    vocabulary = state.bias_SV.shape[-1]

    def following() -> Chosen:
        last_1V = logits(count - 1, 1)
        chosen_1 = choose_rows(
            last_1V,
            row,
            (begin + count)[None],
            prompt_counts_SV=one(state.prompt_counts_SV),
            output_counts_SV=one(state.output_counts_SV),
            bias_SV=one(state.bias_SV),
        )
        return _described(last_1V, chosen_1, wants_top)

    chosen = jax.lax.cond(is_last, following, lambda: _nothing(jnp.zeros(1, jnp.int32), vocabulary))
    counts_SV = state.output_counts_SV.at[slot, chosen.tokens[0]].add(is_last.astype(jnp.int32))
    prompt = jax.lax.cond(
        wants_prompt,
        lambda: _described(logits(0, len(tokens_C)), next_tokens_C, wants_top),
        lambda: _nothing(next_tokens_C, vocabulary),
    )
    state = SlotState(cache, state.prompt_counts_SV, counts_SV, state.bias_SV)
    return state, chosen, prompt


def _deferred(
    params: Params, tokens_1C: jax.Array, positions_1C: jax.Array, cache: Any, decoder: Decoder
) -> tuple[Callable[[jax.Array | int, int], jax.Array], Any]:
    """Feed tokens of one row; returns (first, number) -> logits float32 [number, V] of some of them, and the cache.

    The vocabulary is a large part of what a small model computes for a chunk, and one token needs it.
    """
    if decoder.deferred is None:
        logits_1CV, cache = decoder.decode(params, tokens_1C, positions_1C, cache)
        return lambda first, number: jax.lax.dynamic_slice_in_dim(logits_1CV[0], first, number), cache
    deferred, cache = decoder.deferred(params, tokens_1C, positions_1C, cache)

    def logits(first: jax.Array | int, number: int) -> jax.Array:
        hidden_1ND = jax.lax.dynamic_slice_in_dim(deferred.hidden, first, number, axis=1)
        return replace(deferred, hidden=hidden_1ND).logits()[0].astype(jnp.float32)

    return logits, cache


def set_penalties(state: SlotState, slot: jax.Array, prompt_counts_V: jax.Array, bias_V: jax.Array) -> SlotState:
    """Begin the counts of a request with penalties, and set its biases.

    Args:
        state: of the slots.
        slot: index, int32 [].
        prompt_counts_V: how often each token is in its prompt, int32.
        bias_V: float32.
    """
    return SlotState(
        state.cache,
        state.prompt_counts_SV.at[slot].set(prompt_counts_V),
        state.output_counts_SV.at[slot].set(0),
        state.bias_SV.at[slot].set(bias_V),
    )


def copy_slot(state: SlotState, source: jax.Array, target: jax.Array, *, layout: CacheLayout) -> SlotState:
    """Copy the keys and values of one slot to another.

    Args:
        state: of the slots.
        source, target: indices, int32 [].
        layout: of the cache.
    """
    cache = layout.put(state.cache, layout.take(state.cache, source), target)
    return SlotState(cache, state.prompt_counts_SV, state.output_counts_SV, state.bias_SV)


def _described(logits_RV: jax.Array, tokens_R: jax.Array, wants_top: jax.Array) -> Chosen:
    """What is reported of a token in each row; sorting out the alternatives is left out where nobody asked."""
    number = min(MOST_ALTERNATIVES, logits_RV.shape[-1])

    def with_top() -> tuple[jax.Array, jax.Array, jax.Array]:
        return log_probabilities_of(logits_RV, tokens_R, number)

    def alone() -> tuple[jax.Array, jax.Array, jax.Array]:
        shape = (*tokens_R.shape, number)
        return log_probabilities_of(logits_RV, tokens_R, 0)[0], jnp.zeros(shape, jnp.int32), jnp.zeros(shape)

    return Chosen(tokens_R, *jax.lax.cond(wants_top, with_top, alone))


def _nothing(tokens_R: jax.Array, vocabulary: int) -> Chosen:
    shape = (*tokens_R.shape, min(MOST_ALTERNATIVES, vocabulary))
    return Chosen(tokens_R, jnp.zeros(tokens_R.shape), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))
