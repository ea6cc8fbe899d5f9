"""Texts that continue prompts, or that a model with an encoder writes about them: whole, or as they are written.

Shapes: B prompts, T new tokens.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.data import Tokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference.beam import beam_search
from jaxtrain.inference.decoding import Generated, generation_pieces
from jaxtrain.inference.prompts import (
    NOTHING_SPECIAL,
    EncodedPrompts,
    SpecialTokens,
    decoder_of,
    encode_prompts,
    room_for_new_tokens,
    special_tokens,
)
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.text_stream import TextStream, TokenTexts
from jaxtrain.models.model import Decoder, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.train.step import TrainStep

# Tokens between two looks for a stop string, for which the host waits.
_PIECE = 16
_DEFAULT_TOKENS = 200


def generate_text(
    step: TrainStep | ShardedModel,
    params: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    new_tokens: int,
    sampling: Sampling | Sequence[Sampling],
    seed: int | Sequence[int] = 0,
    stop: Sequence[str] = (),
    stop_tokens: Collection[int] = (),
    add_special_tokens: bool = True,
    skip_special_tokens: bool = True,
    cache_dtype: str | None = None,
) -> list[str]:
    """Continue prompts, or write the outputs of a model that reads them with an encoder.

    A row ends at its end-of-text token or at a stop string, and the program when all rows have ended. The compiled
    programs are kept with the sharded model: another call with as many prompts of a similar length and the same
    `new_tokens` compiles nothing, whatever the rows are sampled by.

    Args:
        step: a train step, or a sharded model: model, number formats and layout.
        params: as in the state, on any mesh; also quantized.
        tokenizer: turns the prompts into ids, and ids into text.
        prompts: a list of texts; all are continued in one batch.
        new_tokens: tokens to add to each, at most.
        sampling: how tokens are chosen, of all prompts or one per prompt.
        seed: of the random choices: row r has seed + r; or a list of one per prompt.
        stop: texts at which a continuation ends; they are not part of it.
        stop_tokens: ids that end it beside the tokenizer's end of text; they are not part of it.
        add_special_tokens: whether what the tokenizer's file puts before a text (a beginning of text) is put before
            each prompt. Published models are trained so; a run on plain text is not.
        skip_special_tokens: whether special tokens that the model writes are left out of the text.
        cache_dtype: of keys and values: float32, bfloat16, float16 or int8; None: the compute dtype.

    Returns:
        For each prompt, the prompt and its continuation up to the end-of-text token or a stop; of a model with an
        encoder, its output up to there.

    Raises:
        ConfigError: the model cannot generate, `prompts` is a single text, `new_tokens` is below 1, or prompt and
            continuation exceed its positions.

    Example:
        >>> from jaxtrain.data.tokenizer import ByteTokenizer
        >>> sharded = jt.shard_model(text_model)
        >>> params, _ = jax.jit(sharded.init)(jax.random.key(0))
        >>> texts = jt.generate_text(
        ...     sharded, params, ByteTokenizer(), ["To be"], new_tokens=2, sampling=jt.Sampling(temperature=0.7)
        ... )
        >>> texts[0].startswith("To be")
        True
    """
    if isinstance(prompts, str):
        raise ConfigError(f"prompts is one text, {prompts[:20]!r}; use a list of texts: [{prompts[:20]!r}]")
    if not len(prompts):
        return []
    sharded_model = step.sharded_model if isinstance(step, TrainStep) else step
    encoded = encode_prompts(sharded_model.model, tokenizer, prompts, add_special_tokens=add_special_tokens)
    ends = {*stop_tokens, *(() if encoded.end is None else (encoded.end,))}
    hidden = special_tokens(tokenizer) if skip_special_tokens else frozenset()
    ended_B, texts = np.zeros(len(prompts), bool), [""] * len(prompts)
    for found in generation_pieces(
        sharded_model,
        params,
        encoded.tokens,
        new_tokens=new_tokens,
        sampling=sampling,
        seed=seed,
        stop_tokens=ends,
        cache_dtype=cache_dtype,
        piece=_PIECE if stop else None,
        ended_B=ended_B,
    ):
        for row in np.flatnonzero(~ended_B):
            given, new = encoded.given[row], found.tokens[row, : found.counts[row]].tolist()
            text = tokenizer.decode([*given, *_before(new, ends, hidden)])
            begin = len(tokenizer.decode(given)) if stop and given else 0
            cuts = [at for at in (text.find(one, begin) for one in stop) if at >= 0]
            texts[row], ended_B[row] = text[: min(cuts, default=None)], bool(cuts)
    return texts


def _before(new: Sequence[int], ends: Collection[int], hidden: Collection[int]) -> list[int]:
    """The new tokens before the one that ends them, without hidden ones."""
    end = next((place for place, token in enumerate(new) if token in ends), len(new))
    return [token for token in new[:end] if token not in hidden]


def continue_texts(
    sharded_model: ShardedModel,
    params: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    new_tokens: int | None,
    sampling: Sampling,
    seed: int,
    stop: Sequence[str],
    beams: int | None,
    special: SpecialTokens = NOTHING_SPECIAL,
    skip_special_tokens: bool = True,
) -> list[str]:
    """Continue texts in one batch, drawn at random or found by a search.

    Args:
        sharded_model, params, tokenizer, prompts, seed, stop, skip_special_tokens: as for `generate_text`.
        new_tokens: tokens to add to each, at most; None: 200, or as many as the model has positions for.
        sampling: how tokens are chosen, without `beams`.
        beams: beginnings of each text that are followed for the most likely one; None: tokens are chosen one by one.
        special: what is known of the model's special tokens.

    Returns:
        Each prompt with its continuation; of a model with an encoder, its output.

    Raises:
        ConfigError: the model cannot generate, or an option is out of range or does not go with another.
    """
    encoded = encode_prompts(sharded_model.model, tokenizer, prompts, add_special_tokens=special.added)
    if new_tokens is None:
        new_tokens = default_new_tokens(decoder_of(sharded_model.model), encoded)
    if beams is None:
        return generate_text(
            sharded_model,
            params,
            tokenizer,
            prompts,
            new_tokens=new_tokens,
            sampling=sampling,
            seed=seed,
            stop=stop,
            stop_tokens=special.stop,
            add_special_tokens=special.added,
            skip_special_tokens=skip_special_tokens,
        )
    if sampling != Sampling(sampling.temperature) or stop:
        raise ConfigError("beams draw nothing: they go with no top_k, top_p, min_p, penalty or stop; leave those out")
    ends = {*special.stop, *(() if encoded.end is None else (encoded.end,))}
    hidden = special_tokens(tokenizer) if skip_special_tokens else frozenset()
    found = beam_search(sharded_model, params, encoded.tokens, beams=beams, new_tokens=new_tokens, stop_tokens=ends)
    rows = zip(encoded.given, found.tokens[:, 0].tolist(), found.counts[:, 0], strict=True)
    return [tokenizer.decode([*given, *_before(new[:count], ends, hidden)]) for given, new, count in rows]


def default_new_tokens(decoder: Decoder, encoded: EncodedPrompts) -> int:
    """The tokens that are added where nobody says how many: 200, or as many as the model has positions for."""
    longest = max(map(len, encoded.tokens), default=1)
    return max(1, min(_DEFAULT_TOKENS, room_for_new_tokens(decoder, longest)))


@dataclass(frozen=True)
class TokenScore:
    """A token that the model wrote.

    Attributes:
        text: of the token alone; U+FFFD for a part of a character.
        log_probability: natural logarithm of its probability by the model alone, before temperature and penalties.
        top: the likeliest tokens at its place, the likeliest first.
    """

    text: str
    log_probability: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Written:
    """What a row has more than before.

    Attributes:
        row: its index in the batch.
        text: whole characters.
        scores: of the tokens that were written, where log-probabilities were asked for; a token whose text is held
            back, or is no part of it, is among them.
        ended: whether nothing follows.
    """

    row: int
    text: str
    scores: tuple[TokenScore, ...] = ()
    ended: bool = False


def write_texts(
    sharded_model: ShardedModel,
    params: Params,
    tokenizer: Tokenizer,
    encoded: Sequence[np.ndarray],
    *,
    new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    stop: Sequence[str] = (),
    stop_tokens: Collection[int] = (),
    hidden: Collection[int] = (),
    begins: Sequence[bool] | None = None,
    top: int | None = None,
    piece: int | None = 1,
) -> Iterator[Written]:
    """Continue prompts in one batch, and give out each row's text as it is written.

    Args:
        sharded_model, params, tokenizer, new_tokens, sampling, seed: as for `generate_text`.
        encoded: at least one prompt, int32 [length] each, none of them empty.
        stop: texts at which a continuation ends; they are not part of it.
        stop_tokens: ids that end it; they are not part of it.
        hidden: ids that the text leaves out.
        begins: whether each text stands alone, so that a tokenizer that writes a space before each word leaves out the
            first one; otherwise it follows its prompt, as all do by default.
        top: alternatives whose log-probabilities are given; None: no log-probabilities.
        piece: tokens of each row between two looks; None: all.

    Raises:
        ConfigError: as for `generate_text`.
    """
    ended_B, fed, single = np.zeros(len(encoded), bool), [0] * len(encoded), TokenTexts(tokenizer)
    streams = [
        TextStream(tokenizer, stop=stop, stop_tokens=stop_tokens, hidden=hidden, begins=begins is not None and one)
        for one in begins or [False] * len(encoded)
    ]
    for found in generation_pieces(
        sharded_model,
        params,
        encoded,
        new_tokens=new_tokens,
        sampling=sampling,
        seed=seed,
        stop_tokens=stop_tokens,
        top=top,
        piece=piece,
        ended_B=ended_B,
    ):
        for row in np.flatnonzero(~ended_B).tolist():
            text, scores, stream = "", [], streams[row]
            for place in range(fed[row], int(found.counts[row])):
                text += stream.feed(int(found.tokens[row, place]))
                if top is not None:
                    scores.append(_score(found, row, place, single))
                if stream.stopped:
                    break
            fed[row], ended_B[row] = int(found.counts[row]), stream.stopped
            yield Written(row, text, tuple(scores), stream.stopped)
    for row in np.flatnonzero(~ended_B).tolist():
        yield Written(row, streams[row].finish(), ended=True)


def _score(found: Generated, row: int, place: int, texts: TokenTexts) -> TokenScore:
    pairs = zip(found.top_ids[row, place].tolist(), found.top_log_probabilities[row, place].tolist(), strict=True)
    return TokenScore(
        texts(int(found.tokens[row, place])),
        float(found.log_probabilities[row, place]),
        tuple((texts(token), value) for token, value in pairs),
    )
