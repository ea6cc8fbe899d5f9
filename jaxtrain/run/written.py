"""Texts of a saved run as they are written: continuations of prompts, and answers to questions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxtrain.inference.chat import encode_questions
from jaxtrain.inference.continued import default_new_tokens
from jaxtrain.inference.decoding import decoder_of
from jaxtrain.inference.prompts import encode_prompts, special_tokens
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.written import Written, write_texts
from jaxtrain.run.answers import run_chat_format
from jaxtrain.run.opened import OpenedRun
from jaxtrain.run.special import special_of_run

# Tokens of an answer where nobody says how many.
_ANSWER_TOKENS = 200


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


def write_continuations(run: OpenedRun, prompts: Sequence[str], writing: Writing) -> Iterator[Written]:
    """Continue texts in one batch; each prompt is the first that its row gives out.

    Raises:
        ConfigError: the run does not generate text, or an option is out of range.
    """
    model, params, tokenizer = run.writer
    if not prompts:
        return
    special = special_of_run(run.info, run.run_dir, tokenizer)
    encoded = encode_prompts(model.model, tokenizer, prompts, add_special_tokens=special.added)
    new_tokens = writing.new_tokens
    if new_tokens is None:
        new_tokens = default_new_tokens(decoder_of(model.model), encoded)
    for row, given in enumerate(encoded.given):
        if given:
            yield Written(row, tokenizer.decode(given))
    yield from write_texts(
        model,
        params,
        tokenizer,
        encoded.tokens,
        new_tokens=new_tokens,
        sampling=writing.sampling,
        seed=writing.seed,
        stop=writing.stop,
        stop_tokens={*special.stop, *(() if encoded.end is None else (encoded.end,))},
        hidden=special_tokens(tokenizer) if writing.skip_special_tokens else (),
        begins=not any(encoded.given),
        top=_top(writing, model.model.vocab_size),
        piece=writing.piece,
    )


def write_answers(run: OpenedRun, questions: Sequence[str], writing: Writing) -> Iterator[Written]:
    """Answer questions in one batch, each a conversation of its own.

    Raises:
        ConfigError: the run has no chat template, or the model cannot generate.
        DataError: the template refuses a question.
    """
    form = run_chat_format(run, instead="use -p TEXT to continue a text")
    encoded, room = encode_questions(run.sharded_model, run.tokenizer, form, questions)
    tokenizer = run.tokenizer
    assert tokenizer is not None
    wanted = _ANSWER_TOKENS if writing.new_tokens is None else writing.new_tokens
    yield from write_texts(
        run.sharded_model,
        run.params,
        tokenizer,
        encoded,
        new_tokens=max(1, min(wanted, room)),
        sampling=writing.sampling,
        seed=writing.seed,
        stop=writing.stop,
        stop_tokens=form.stop,
        hidden=special_tokens(tokenizer) if writing.skip_special_tokens else (),
        begins=True,
        top=_top(writing, run.sharded_model.model.vocab_size),
        piece=writing.piece,
    )


def _top(writing: Writing, vocab_size: int | None) -> int | None:
    """Alternatives per token, of which there are no more than tokens."""
    return writing.top if writing.top is None or vocab_size is None else min(writing.top, vocab_size)
