"""Answers of a model to questions, written and read by its chat template."""

import datetime
from collections.abc import Sequence

import numpy as np

from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.templates import ChatFormat, chat_encoder, compile_template, prompt_text
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference.generate import generate_ids, room_for_new_tokens
from jaxtrain.inference.prompts import check_characters, special_tokens
from jaxtrain.inference.sampling import Sampling
from jaxtrain.models.model import Params
from jaxtrain.models.sharded import ShardedModel


def answer_questions(
    sharded_model: ShardedModel,
    params: Params,
    tokenizer: Tokenizer | None,
    form: ChatFormat,
    questions: Sequence[str],
    *,
    new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    skip_special_tokens: bool = True,
) -> list[str]:
    """Answers questions, each a conversation of its own, up to a token at which the model stops.

    Args:
        sharded_model: has a decoder.
        params: on any mesh; also quantized.
        tokenizer: turns texts into ids.
        form: how conversations are written.
        questions: what the user says; all are answered in one batch.
        new_tokens: tokens of an answer, at most; fewer where the model has not so many positions.
        sampling: how tokens are chosen.
        seed: of the random choices.
        skip_special_tokens: whether special tokens that the model writes are left out.

    Returns:
        The answers, without the token that ends them.

    Raises:
        ConfigError: the model cannot generate, a question exceeds its positions, or the template fails.
        DataError: the template refuses a question.
    """
    encoded, room = encode_questions(sharded_model, tokenizer, form, questions)
    assert tokenizer is not None
    new_BT = generate_ids(
        sharded_model,
        params,
        encoded,
        new_tokens=max(1, min(new_tokens, room)),
        sampling=sampling,
        seed=seed,
        stop_tokens=answer_ends(form, tokenizer),
    )
    return until_stop(new_BT, form, tokenizer, skip_special_tokens=skip_special_tokens)


def encode_questions(
    sharded_model: ShardedModel, tokenizer: Tokenizer | None, form: ChatFormat, questions: Sequence[str]
) -> tuple[list[np.ndarray], int]:
    """Writes questions by a chat template.

    Args:
        sharded_model, tokenizer, form, questions: as for `answer_questions`.

    Returns:
        Ids of each, int32 [length], and how many tokens can follow the longest.

    Raises:
        ConfigError, DataError: as for `answer_questions`.
    """
    if not isinstance(tokenizer, BpeTokenizer | ByteTokenizer):
        raise ConfigError("the run has no tokenizer.json, so it cannot answer")
    decoder = sharded_model.model.decoder
    if decoder is None:
        raise ConfigError(f"model {sharded_model.model.name} does not generate text")
    check_characters(tokenizer, questions)
    template = compile_template(form, today=datetime.date.today())
    texts = [prompt_text(template, [{"role": "user", "content": question}]) for question in questions]
    encoded = [found.ids for found in chat_encoder(tokenizer).encode(texts)]
    return encoded, room_for_new_tokens(decoder, max(map(len, encoded)))


def answer_ends(form: ChatFormat, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids at which an answer ends: those of the template, and the end of text, after which a document begins."""
    end = tokenizer.end_of_text
    return frozenset([*form.stop, *(() if end is None else (end,))])


def until_stop(
    new_BT: np.ndarray, form: ChatFormat, tokenizer: Tokenizer, *, skip_special_tokens: bool = True
) -> list[str]:
    """Returns what was generated before the first stop token of each row.

    Args:
        new_BT: int32 [B, T].
        form: has the stop tokens.
        tokenizer: turns ids into text; its end of text stops an answer too.
        skip_special_tokens: whether special tokens are left out.
    """
    hidden = special_tokens(tokenizer) if skip_special_tokens else frozenset()
    answers, ends = [], sorted(answer_ends(form, tokenizer))
    for new in new_BT:
        stop = np.flatnonzero(np.isin(new, ends))
        kept = new[: stop[0] if len(stop) else None].tolist()
        answers.append(tokenizer.decode([token for token in kept if token not in hidden]))
    return answers
