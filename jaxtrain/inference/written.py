"""Texts as they are written: what each row of a batch has more than before, with log-probabilities."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.data import Tokenizer
from jaxtrain.inference.pieces import Generated, generation_pieces
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.text_stream import TextStream, TokenTexts
from jaxtrain.models.model import Params
from jaxtrain.models.sharded import ShardedModel


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
        sharded_model: has a decoder.
        params: on any mesh; also quantized.
        tokenizer: turns ids into text.
        encoded: at least one prompt, int32 [length] each, none of them empty.
        new_tokens: tokens to add to each, at most.
        sampling: how tokens are chosen.
        seed: of the random choices: row r has seed + r.
        stop: texts at which a continuation ends; they are not part of it.
        stop_tokens: ids that end it; they are not part of it.
        hidden: ids that the text leaves out.
        begins: whether each text stands alone, so that a tokenizer that writes a space before each word leaves out the
            first one; otherwise it follows its prompt, as all do by default.
        top: alternatives whose log-probabilities are given; None: no log-probabilities.
        piece: tokens of each row between two looks; None: all.

    Raises:
        ConfigError: as for `generate_ids`.
    """
    ended_B = np.zeros(len(encoded), bool)
    rows = [
        _Row(
            index,
            tokenizer,
            stop=stop,
            stop_tokens=stop_tokens,
            hidden=hidden,
            begins=begins is not None and begins[index],
        )
        for index in range(len(encoded))
    ]
    texts = TokenTexts(tokenizer)
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
        for row in rows:
            if not ended_B[row.index]:
                written = row.feed(found, texts)
                ended_B[row.index] = written.ended
                yield written
    for row in rows:
        if not ended_B[row.index]:
            yield row.finish()


class _Row:
    """One text as it grows."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str],
        stop_tokens: Collection[int],
        hidden: Collection[int],
        begins: bool,
    ):
        self.index, self._tokenizer, self._begins = index, tokenizer, begins
        self._stream = TextStream(tokenizer, stop=stop, stop_tokens=stop_tokens, hidden=hidden)
        self._kept: list[int] = []  # tokens before the first text
        self._fed = 0

    def feed(self, found: Generated, texts: TokenTexts) -> Written:
        """What was generated since the last time, up to a stop."""
        text, scores = "", []
        for place in range(self._fed, int(found.counts[self.index])):
            token = int(found.tokens[self.index, place])
            text += self._begun(self._stream.feed(token), token)
            if found.log_probabilities is not None:
                scores.append(_score(found, self.index, place, texts))
            if self._stream.stopped:
                break
        self._fed = int(found.counts[self.index])
        return Written(self.index, text, tuple(scores), self._stream.stopped)

    def finish(self) -> Written:
        """The rest, when no further token comes."""
        return Written(self.index, self._begun(self._stream.finish(), None), ended=True)

    def _begun(self, text: str, token: int | None) -> str:
        """The text without the space that a tokenizer leaves out where nothing stands before it."""
        if not self._begins:
            return text
        if token is not None:
            self._kept.append(token)
        if text:
            self._begins = False
            if text.startswith(" ") and not self._tokenizer.decode(self._kept).startswith(" "):
                return text[1:]
        return text


def _score(found: Generated, row: int, place: int, texts: TokenTexts) -> TokenScore:
    assert found.log_probabilities is not None
    assert found.top_ids is not None
    assert found.top_log_probabilities is not None
    pairs = zip(found.top_ids[row, place].tolist(), found.top_log_probabilities[row, place].tolist(), strict=True)
    return TokenScore(
        texts(int(found.tokens[row, place])),
        float(found.log_probabilities[row, place]),
        tuple((texts(token), value) for token, value in pairs),
    )
