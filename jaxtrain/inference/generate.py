"""Texts that continue prompts, answer questions or are written about them: whole, or as they are written.

Shapes: B prompts, T new tokens.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.conversation import Conversation
from jaxtrain.data.chat.templates import ChatFormat
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, NamedTokens
from jaxtrain.inference.decoding import Writing, generation_pieces
from jaxtrain.inference.prompts import (
    PromptReader,
    SpecialTokens,
    decoder_of,
    encode_prompts,
    room_for_new_tokens,
)
from jaxtrain.inference.sampling import Sampling
from jaxtrain.models.model import Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.train.step import TrainStep

# Tokens between two looks for a stop string.
_PIECE = 16
_DEFAULT_TOKENS = 200
_REPLACEMENT = "\ufffd"
# A character of UTF-8 lacks at most its last three bytes; a tokenizer may show each missing one by itself.
_LONGEST_INCOMPLETE = 3


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
        seed: of the random choices; each row has its own. Or a list of one per prompt, which is then as alone.
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
        ConfigError: the model cannot generate, `new_tokens` is below 1, or prompt and continuation exceed its
            positions.

    Example:
        >>> from jaxtrain.data.tokenizer import ByteTokenizer
        >>> sharded = jt.shard_model(text_model)
        >>> params, _ = jax.jit(sharded.init)(jax.random.key(0))
        >>> greedy = jt.Sampling(temperature=0)
        >>> texts = jt.generate_text(sharded, params, ByteTokenizer(), ["To be"], new_tokens=2, sampling=greedy)
        >>> texts[0].startswith("To be")
        True
    """
    sharded_model = step.sharded_model if isinstance(step, TrainStep) else step
    if isinstance(prompts, str):
        prompts = [prompts]
    writing = Writing(
        new_tokens,
        sampling,
        seed,
        stop,
        skip_special_tokens=skip_special_tokens,
        piece=_PIECE if stop else None,
        stop_tokens=stop_tokens,
        add_special_tokens=add_special_tokens,
        cache_dtype=cache_dtype,
    )
    if not prompts:
        return []
    return joined(write_texts(sharded_model, params, tokenizer, prompts, writing), len(prompts))


@dataclass(frozen=True)
class Written:
    """What a row has more than before.

    Attributes:
        row: its index in the batch.
        text: whole characters.
    """

    row: int
    text: str


def joined(pieces: Iterable[Written], count: int) -> list[str]:
    """Join what `write_texts` gives out for each of `count` texts."""
    texts = [""] * count
    for piece in pieces:
        texts[piece.row] += piece.text
    return texts


def write_texts(
    sharded_model: ShardedModel,
    params: Params,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    writing: Writing,
    chat: ChatFormat | None = None,
) -> Iterator[Written]:
    """Continue texts in one batch, each given out before its continuation; with `chat` answer them by its template.

    An answer has as many tokens as there is room for, if those are fewer than asked for, and stands alone.

    Raises:
        ConfigError: as for `generate_text`, or the template fails.
        DataError: the template refuses a question.
    """
    decoder = decoder_of(sharded_model.model)
    if chat is None:
        encoded, ends = encode_prompts(
            sharded_model.model, tokenizer, texts, add_special_tokens=writing.add_special_tokens
        )
    else:
        assert isinstance(tokenizer, BpeTokenizer | ByteTokenizer)
        reader = PromptReader(tokenizer, chat, SpecialTokens())
        questions = [Conversation("the question", ({"role": "user", "content": text},)) for text in texts]
        encoded = [np.array(reader.of_chat(question), np.int32) for question in questions]
        ends = reader.stop_tokens
    new_tokens = writing.new_tokens
    if new_tokens is None or chat is not None:
        room = room_for_new_tokens(decoder, max(map(len, encoded)))
        new_tokens = max(1, min(new_tokens or _DEFAULT_TOKENS, room))
    writing = replace(writing, new_tokens=new_tokens, stop_tokens=ends.union(writing.stop_tokens))
    hidden = ()
    if writing.skip_special_tokens and isinstance(tokenizer, NamedTokens):
        hidden = tokenizer.special_ids()
    is_continued = chat is None and decoder.encode is None
    streams = []
    for row, text in enumerate(texts):
        # Without a prompt before it, the text of a tokenizer that writes a space before each word has no first space.
        begins = not (is_continued and text)
        streams.append(TextStream(tokenizer, writing.stop, writing.stop_tokens, hidden=hidden, begins=begins))
        if not begins:
            yield Written(row, text)
    ended_B = np.zeros(len(texts), bool)
    num_read = [0] * len(texts)
    for generated in generation_pieces(sharded_model, params, encoded, writing, ended_B):
        for row in np.flatnonzero(~ended_B).tolist():
            count = int(generated.counts[row])
            new_T = generated.tokens[row, num_read[row] : count]
            text = "".join(streams[row].feed(token) for token in new_T.tolist())
            num_read[row] = count
            ended_B[row] = streams[row].stopped
            yield Written(row, text)
    for row in np.flatnonzero(~ended_B).tolist():
        yield Written(row, streams[row].finish())


class TextStream:
    """The text of one row of generated tokens, given out as soon as it is certain.

    A character is given out when all of its bytes are there, and text that may be the beginning of a stop string when
    it turns out not to be.

    Args:
        tokenizer: turns ids into text.
        stop: strings at which the text ends, none empty; they are not part of it.
        stop_tokens: ids at which it ends.
        hidden: ids that are left out, such as those of special tokens; the text is that of the others.
        begins: whether nothing stands before it, so that a tokenizer that writes a space before each word leaves out
            the first one; otherwise the text is a continuation, which keeps it.

    Attributes:
        stopped: whether a stop string or a stop token was met; what follows it is not given out.

    Example:
        >>> from jaxtrain.data.tokenizer import ByteTokenizer
        >>> stream = TextStream(ByteTokenizer(), stop=["END"])
        >>> [stream.feed(byte) for byte in "éEN".encode()], stream.finish()
        (['', 'é', '', ''], 'EN')
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        stop_tokens: Collection[int] = (),
        *,
        hidden: Collection[int] = (),
        begins: bool = False,
    ):
        self._stop = tuple(stop)
        self._stop_tokens = frozenset(stop_tokens)
        self._hidden = frozenset(hidden) - self._stop_tokens
        self._continue = _continued(tokenizer)
        self._decode = tokenizer.decode if begins else self._continue
        self._tokens: list[int] = []  # those whose text is not certain
        self._num_certain = 0  # characters of their text that were certain
        self._held = ""  # certain text that may begin a stop string
        self.stopped = False

    def feed(self, token: int) -> str:
        """Return the text that the next token makes certain; after a stop there is none."""
        if self.stopped or token in self._hidden:
            return ""
        if token in self._stop_tokens:
            rest = self.finish()
            self.stopped = True
            return rest
        self._tokens.append(token)
        decoded = self._decode(self._tokens)
        tail = decoded[-_LONGEST_INCOMPLETE:]
        num_incomplete = len(tail) - len(tail.rstrip(_REPLACEMENT))
        num_certain = max(len(decoded) - num_incomplete, self._num_certain)
        piece = decoded[self._num_certain : num_certain]
        self._num_certain = num_certain
        if num_incomplete == 0:
            self._tokens = []
            self._num_certain = 0
            if decoded:
                self._decode = self._continue
        return self._release(piece, is_end=False)

    def finish(self) -> str:
        """Return the rest of the text, when no further token comes."""
        if self.stopped:
            return ""
        rest = ""
        if self._tokens:
            rest = self._decode(self._tokens)[self._num_certain :]
        return self._release(rest, is_end=True)

    def text_of(self, token: int) -> str:
        """Return the text of a token alone; U+FFFD for a part of a character."""
        return self._continue([token])

    def _release(self, piece: str, *, is_end: bool) -> str:
        """Give out the text that is held and this piece after it, but for what may begin a stop string."""
        text = self._held + piece
        starts = [text.find(stop) for stop in self._stop if stop in text]
        if starts:
            self.stopped = True
            return text[: min(starts)]
        num_held = 0
        if not is_end:
            for stop in self._stop:
                for size in range(num_held + 1, len(stop)):
                    if text.endswith(stop[:size]):
                        num_held = size
        num_given = len(text) - num_held
        self._held = text[num_given:]
        return text[:num_given]


def _continued(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Make the function from ids to their text as a continuation: a space before the first word stays."""
    # Before it, the first token of a text would lose its space in the tokenizers that write "▁word".
    anchor = [int(i) for i in tokenizer.encode("a")]
    start = len(tokenizer.decode(anchor))
    return lambda ids: tokenizer.decode([*anchor, *ids])[start:]
