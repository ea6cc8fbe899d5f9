"""Texts that continue prompts, or that a model with an encoder writes about them: whole, or as they are written.

Shapes: B prompts, T new tokens.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.data import Tokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference.decoding import generation_pieces
from jaxtrain.inference.prompts import (
    EncodedPrompts,
    decoder_of,
    encode_prompts,
    room_for_new_tokens,
    special_tokens,
)
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.text_stream import TextStream
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
    new_tokens: int | None,
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
        new_tokens: tokens to add to each, at most; None: 200, or as many as the model has positions for.
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
    if new_tokens is None:
        new_tokens = default_new_tokens(decoder_of(sharded_model.model), encoded)
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
            end = next((place for place, token in enumerate(new) if token in ends), len(new))
            text = tokenizer.decode([*given, *(token for token in new[:end] if token not in hidden)])
            begin = len(tokenizer.decode(given)) if stop and given else 0
            cuts = [at for at in (text.find(one, begin) for one in stop) if at >= 0]
            texts[row], ended_B[row] = text[: min(cuts, default=None)], bool(cuts)
    return texts


def default_new_tokens(decoder: Decoder, encoded: EncodedPrompts) -> int:
    """The tokens that are added where nobody says how many: 200, or as many as the model has positions for."""
    longest = max(map(len, encoded.tokens), default=1)
    return max(1, min(_DEFAULT_TOKENS, room_for_new_tokens(decoder, longest)))


@dataclass(frozen=True)
class Written:
    """What a row has more than before.

    Attributes:
        row: its index in the batch.
        text: whole characters.
        ended: whether nothing follows.
    """

    row: int
    text: str
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
        piece: tokens of each row between two looks; None: all.

    Raises:
        ConfigError: as for `generate_text`.
    """
    ended_B, fed = np.zeros(len(encoded), bool), [0] * len(encoded)
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
        piece=piece,
        ended_B=ended_B,
    ):
        for row in np.flatnonzero(~ended_B).tolist():
            text, stream = "", streams[row]
            for place in range(fed[row], int(found.counts[row])):
                text += stream.feed(int(found.tokens[row, place]))
            fed[row], ended_B[row] = int(found.counts[row]), stream.stopped
            yield Written(row, text, stream.stopped)
    for row in np.flatnonzero(~ended_B).tolist():
        yield Written(row, streams[row].finish(), ended=True)
