"""Generation piece by piece: one program reads the prompts, another one adds tokens until every row has ended.

Both are compiled once for prompts of similar lengths, and kept. Shapes: B prompts, P longest prompt, T new tokens, A
alternatives that are reported.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.arguments import check_choice
from jaxtrain.errors import ConfigError
from jaxtrain.inference.decoding import (
    Advance,
    Decoding,
    DecodingForm,
    Start,
    advance_function,
    decoder_of,
    row_rules,
    start_function,
)
from jaxtrain.inference.sampling import Sampling
from jaxtrain.models.model import Decoder, Model, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.precision.policy import cast_floats
from jaxtrain.runtime.compiler import decoding_options

CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8")
# Prompts are padded to this many tokens times a power of two, so that few lengths are compiled for.
_SHORTEST_PROMPT = 16


@dataclass(frozen=True)
class Generated:
    """What was generated so far, in arrays of NumPy.

    Attributes:
        tokens: int32 [B, T]; zeros follow the last token of a row.
        counts: int32 [B], tokens of each row; one that ended it counts.
        log_probabilities: float32 [B, T], of the tokens before temperature and penalties; None: not asked for.
        top_ids: int32 [B, T, A], the most likely tokens in the place of each one; None as above.
        top_log_probabilities: float32 [B, T, A], theirs.
    """

    tokens: np.ndarray
    counts: np.ndarray
    log_probabilities: np.ndarray | None
    top_ids: np.ndarray | None
    top_log_probabilities: np.ndarray | None


@dataclass(frozen=True)
class _Programs:
    """The compiled functions of one form of generation."""

    start: Start
    advance: Advance


# Compiled functions by what they are for, kept as long as the sharded model is.
_programs: weakref.WeakKeyDictionary[ShardedModel, dict[DecodingForm, _Programs]] = weakref.WeakKeyDictionary()
_casts: weakref.WeakKeyDictionary[ShardedModel, Callable[[Params], Params]] = weakref.WeakKeyDictionary()


def generation_pieces(
    sharded_model: ShardedModel,
    params: Params,
    encoded: Sequence[np.ndarray],
    *,
    new_tokens: int,
    sampling: Sampling | Sequence[Sampling],
    seed: int | Sequence[int] = 0,
    stop_tokens: Collection[int] = (),
    top: int | None = None,
    cache_dtype: str | None = None,
    piece: int | None = None,
    ended_B: np.ndarray | None = None,
) -> Iterator[Generated]:
    """Give out what was generated every few tokens; the last one has everything.

    Args:
        sharded_model, params, encoded, new_tokens, sampling, seed, stop_tokens, top, cache_dtype: as for
            `generate_rows`.
        piece: tokens of each row between two of them; None: all.
        ended_B: bool, rows that the caller ends; it is read before each piece.

    Raises:
        ConfigError: as for `generate_ids`.
    """
    model = sharded_model.model
    batch = len(encoded)
    if cache_dtype is not None:
        check_choice(cache_dtype, CACHE_DTYPES, what="generation: cache_dtype", write="cache_dtype='bfloat16'")
    samplings = [sampling] * batch if isinstance(sampling, Sampling) else list(sampling)
    seeds = (
        [int(seed) + row for row in range(batch)] if isinstance(seed, int | np.integer) else [int(one) for one in seed]
    )
    for name, rows in (("sampling", samplings), ("seed", seeds)):
        if len(rows) != batch:
            raise ConfigError(f"{name} has {len(rows)} entries for {batch} prompts; give one per prompt or one alone")
    prompts_BP, lengths_B = padded_prompts(model, encoded, new_tokens)
    form = DecodingForm(new_tokens, top, any(one.counts_tokens for one in samplings), cache_dtype)
    rules = row_rules(samplings, seeds, stop_tokens, model)
    programs = _compiled(sharded_model, form)
    with sharded_model.context():
        params = cast_params(sharded_model, params)
        texts = programs.start(params, prompts_BP, lengths_B, rules)
    written = 1
    while True:
        done_B = np.asarray(texts.done_B)
        if written >= new_tokens or done_B.all():
            break
        if piece is not None:
            yield _generated(texts)
        if ended_B is not None and (ended_B & ~done_B).any():
            texts = replace(texts, done_B=jnp.asarray(done_B | ended_B))
            if (done_B | ended_B).all():
                break
        written = new_tokens if piece is None else min(written + piece, new_tokens)
        with sharded_model.context():
            texts = programs.advance(params, texts, rules, np.int32(written))
    yield _generated(texts)


def _generated(texts: Decoding) -> Generated:
    arrays = (texts.log_probabilities_BT, texts.top_ids_BTA, texts.top_log_probabilities_BTA)
    # Copies, because the next program writes into the memory of these.
    return Generated(
        np.array(texts.tokens_BT), np.array(texts.counts_B), *(None if a is None else np.array(a) for a in arrays)
    )


def _compiled(sharded_model: ShardedModel, form: DecodingForm) -> _Programs:
    programs = _programs.setdefault(sharded_model, {})
    if form not in programs:
        needs = (sharded_model.model, form, sharded_model.policy, sharded_model.mesh)
        options = {**decoding_options(sharded_model.mesh.devices.flat[0])} or None
        advance = jax.jit(advance_function(*needs), donate_argnames="texts", compiler_options=options)
        programs[form] = _Programs(jax.jit(start_function(*needs)), advance)
    return programs[form]


def cast_params(sharded_model: ShardedModel, params: Params) -> Params:
    """The parameters in the compute dtype, so that no program casts them for each of its calls."""
    dtype = sharded_model.policy.compute_dtype
    shapes = jax.eval_shape(lambda params: cast_floats(params, dtype), params)
    if jax.tree.map(lambda leaf: leaf.dtype, shapes) == jax.tree.map(lambda leaf: leaf.dtype, params):
        return params
    cast = _casts.get(sharded_model)
    if cast is None:
        cast = _casts[sharded_model] = jax.jit(lambda params: cast_floats(params, dtype))
    return cast(params)


def padded_prompts(model: Model, encoded: Sequence[np.ndarray], new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The prompts in rows of one length int32 [B, P], and their own lengths int32 [B].

    Raises:
        ConfigError: there is none, one is empty or holds an id that the vocabulary does not have, or they exceed the
            model's positions, or do so with the new tokens.
    """
    decoder = decoder_of(model)
    _check_prompts(encoded, model.vocab_size)
    longest = max(map(len, encoded))
    room, short = _room(decoder, longest, new_tokens), decoder.short_length
    if short is not None and longest + new_tokens <= short:
        # Padding alone may not make a text a long one, whose positions rotate by other frequencies.
        room = min(room, short - new_tokens)
    prompts_BP = np.zeros((len(encoded), _padded_length(longest, room)), np.int32)
    for row, ids in enumerate(encoded):
        prompts_BP[row, : len(ids)] = ids
    return prompts_BP, np.array([len(ids) for ids in encoded], np.int32)


def _check_prompts(encoded: Sequence[np.ndarray], vocab_size: int | None) -> None:
    """Raise where there is nothing to continue, or an id that would be read as another one."""
    if not len(encoded) or not all(map(len, encoded)):
        raise ConfigError(
            "generation: a prompt without a token cannot be continued; give at least one prompt and token"
        )
    smallest, largest = min(int(np.min(ids)) for ids in encoded), max(int(np.max(ids)) for ids in encoded)
    if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
        outside = smallest if smallest < 0 else largest
        raise ConfigError(
            f"a prompt has token {outside}, but the model's vocabulary has {vocab_size}; use the tokenizer that it was "
            "trained with"
        )


def _room(decoder: Decoder, longest: int, new_tokens: int) -> int:
    """How many tokens prompts may have; a model with an encoder has as many positions for its outputs besides.

    Raises:
        ConfigError: prompts of `longest` tokens, or so many new ones, exceed the model's positions.
    """
    limit = decoder.max_length
    if decoder.encode is None:
        if longest + new_tokens > limit:
            raise ConfigError(
                f"a prompt of {longest} tokens and {new_tokens} new ones exceed the model's {limit} positions; "
                f"ask for at most {max(limit - longest, 0)} new tokens or shorten the prompt"
            )
        return limit - new_tokens
    if longest > limit:
        raise ConfigError(f"a prompt of {longest} tokens exceeds the model's {limit} positions; shorten the prompt")
    if new_tokens > limit:
        raise ConfigError(
            f"{new_tokens} new tokens exceed the model's {limit} positions; ask for at most {limit} new tokens"
        )
    return limit


def room_for_new_tokens(decoder: Decoder, prompt_length: int) -> int:
    """How many tokens can follow a prompt; the outputs of a model with an encoder have all positions for themselves."""
    if decoder.encode is None:
        return decoder.max_length - prompt_length
    return decoder.max_length if prompt_length <= decoder.max_length else 0


def _padded_length(longest: int, room: int) -> int:
    """The compiled length of prompts of `longest` tokens, at most `room`."""
    length = _SHORTEST_PROMPT
    while length < longest:
        length *= 2
    return min(length, room)
