"""Texts of a run or of a published model as they are written: continuations of prompts, and answers to questions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.formats import ChatFormat
from jaxtrain.errors import ConfigError
from jaxtrain.inference.chat import answer_ends, encode_questions
from jaxtrain.inference.continued import continue_texts, default_new_tokens
from jaxtrain.inference.decoding import decoder_of
from jaxtrain.inference.prompts import encode_prompts, special_tokens
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.special import SpecialTokens
from jaxtrain.inference.written import Written, write_texts
from jaxtrain.models.model import Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.run.opened import OpenedRun
from jaxtrain.run.served import open_served
from jaxtrain.run.tokenizer import run_chat_format, special_of_run

# Tokens of an answer where nobody says how many.
_ANSWER_TOKENS = 200
_INSTEAD = "use -p TEXT to continue a text"


@dataclass(frozen=True)
class Writer:
    """What writes texts.

    Attributes:
        sharded_model: has a decoder.
        params: on its mesh; also quantized.
        tokenizer: between texts and ids.
        special: what is known of the special tokens.
        chat: how conversations are written; None: it does not answer questions.
    """

    sharded_model: ShardedModel
    params: Params
    tokenizer: Tokenizer
    special: SpecialTokens
    chat: ChatFormat | None


@dataclass(frozen=True)
class Writing:
    """How texts are written.

    Attributes:
        new_tokens: tokens of each, at most; None: 200, or as many as the model has positions for.
        sampling: how tokens are chosen.
        seed: of the random choices.
        stop: texts at which one ends.
        skip_special_tokens: whether special tokens that the model writes are left out.
        top: alternatives whose log-probabilities are given; None: no log-probabilities.
        piece: tokens between two looks; None: all.
    """

    new_tokens: int | None
    sampling: Sampling
    seed: int = 0
    stop: Sequence[str] = ()
    skip_special_tokens: bool = True
    top: int | None = None
    piece: int | None = 1


def writer_of_run(run: OpenedRun, *, answers: bool) -> Writer:
    """What writes the texts of a run.

    Args:
        run: opened.
        answers: whether it is to answer questions.

    Raises:
        ConfigError: the run does not generate text, or has no chat template to answer by.
    """
    chat = run_chat_format(run, instead=_INSTEAD) if answers else None
    model, params, tokenizer = run.writer
    return Writer(model, params, tokenizer, special_of_run(run.info, run.run_dir, tokenizer), chat)


def writer_of_folder(path: str | Path, *, answers: bool, quantize: str | None, step: int | None) -> Writer:
    """What writes the texts of a published folder, a GGUF file, or an adapter that names its base.

    Args:
        path: of it.
        answers: whether it is to answer questions.
        quantize: number format of linear layers; None: as they are.
        step: refused, because only runs have several.

    Raises:
        ConfigError: there is nothing to open, it has no tokenizer or writes no text, or has no chat template.
        CheckpointError: its files are missing or damaged.
    """
    served = open_served(path, quantize=quantize, step=step, encoder_decoders=True)
    if served.embeds:
        raise ConfigError(f"{path} gives embeddings and no text; use jaxtrain predict or jaxtrain serve")
    if answers and served.chat is None:
        raise ConfigError(f"{path} has no chat template; {_INSTEAD}")
    return Writer(served.sharded_model, served.params, served.tokenizer, served.special, served.chat)


def search_continuations(writer: Writer, prompts: Sequence[str], writing: Writing, *, beams: int) -> list[str]:
    """Find the most likely texts, all at once.

    Args:
        writer: of the texts.
        prompts: that begin them.
        writing: how; the options that draw tokens are refused.
        beams: beginnings that are followed.

    Raises:
        ConfigError: an option is out of range or does not go with beams.
    """
    return continue_texts(
        writer.sharded_model,
        writer.params,
        writer.tokenizer,
        prompts,
        new_tokens=writing.new_tokens,
        sampling=writing.sampling,
        seed=writing.seed,
        stop=writing.stop,
        beams=beams,
        special=writer.special,
        skip_special_tokens=writing.skip_special_tokens,
    )


def write_continuations(writer: Writer, prompts: Sequence[str], writing: Writing) -> Iterator[Written]:
    """Continue texts in one batch; each prompt is the first that its row gives out.

    Raises:
        ConfigError: the model does not generate text, or an option is out of range.
    """
    model, tokenizer = writer.sharded_model, writer.tokenizer
    encoded = encode_prompts(model.model, tokenizer, prompts, add_special_tokens=writer.special.added)
    new_tokens = writing.new_tokens
    if new_tokens is None:
        new_tokens = default_new_tokens(decoder_of(model.model), encoded)
    for row, given in enumerate(encoded.given):
        if given:
            yield Written(row, tokenizer.decode(given))
    yield from write_texts(
        model,
        writer.params,
        tokenizer,
        encoded.tokens,
        new_tokens=new_tokens,
        sampling=writing.sampling,
        seed=writing.seed,
        stop=writing.stop,
        stop_tokens={*writer.special.stop, *(() if encoded.end is None else (encoded.end,))},
        hidden=special_tokens(tokenizer) if writing.skip_special_tokens else (),
        begins=[not given for given in encoded.given],
        top=_top(writing, model.model.vocab_size),
        piece=writing.piece,
    )


def write_answers(writer: Writer, questions: Sequence[str], writing: Writing) -> Iterator[Written]:
    """Answer questions in one batch, each a conversation of its own.

    Args:
        writer: that was opened to answer.
        questions: what the user says.
        writing: how.

    Raises:
        ConfigError: the model cannot generate, or a question exceeds its positions.
        DataError: the template refuses a question.
    """
    assert writer.chat is not None
    model, tokenizer = writer.sharded_model, writer.tokenizer
    encoded, room = encode_questions(model, tokenizer, writer.chat, questions)
    wanted = _ANSWER_TOKENS if writing.new_tokens is None else writing.new_tokens
    yield from write_texts(
        model,
        writer.params,
        tokenizer,
        encoded,
        new_tokens=max(1, min(wanted, room)),
        sampling=writing.sampling,
        seed=writing.seed,
        stop=writing.stop,
        stop_tokens=answer_ends(writer.chat, tokenizer),
        hidden=special_tokens(tokenizer) if writing.skip_special_tokens else (),
        begins=[True] * len(questions),
        top=_top(writing, model.model.vocab_size),
        piece=writing.piece,
    )


def _top(writing: Writing, vocab_size: int | None) -> int | None:
    """Alternatives per token, of which there are no more than tokens."""
    return writing.top if writing.top is None or vocab_size is None else min(writing.top, vocab_size)
