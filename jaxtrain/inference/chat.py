"""Answers of a model to questions, written and read by its chat template."""

import datetime
from collections.abc import Sequence

import numpy as np

from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.templates import ChatFormat, chat_encoder, compile_template, prompt_text
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.inference.generate import write_texts
from jaxtrain.inference.prompts import decoder_of, room_for_new_tokens, special_tokens
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
) -> list[str]:
    """Answers questions, each a conversation of its own, up to a token at which the model stops.

    Args:
        sharded_model, params: as for `generate_text`.
        tokenizer: from a tokenizer.json.
        form: how conversations are written.
        questions: what the user says, answered in one batch.
        new_tokens: tokens of an answer, at most.
        sampling: how tokens are chosen.
        seed: of the random choices.

    Returns:
        The answers, without the token that ends them and without special tokens.

    Raises:
        ConfigError: the model cannot generate, a question exceeds its positions, or the template fails.
        DataError: the template refuses a question.
    """
    encoded, room = encode_questions(sharded_model, tokenizer, form, questions)
    assert tokenizer is not None
    answers = [""] * len(questions)
    for written in write_texts(
        sharded_model,
        params,
        tokenizer,
        encoded,
        new_tokens=max(1, min(new_tokens, room)),
        sampling=sampling,
        seed=seed,
        stop_tokens=answer_ends(form, tokenizer),
        hidden=special_tokens(tokenizer),
        begins=[True] * len(questions),
        piece=None,
    ):
        answers[written.row] += written.text
    return answers


def encode_questions(
    sharded_model: ShardedModel, tokenizer: Tokenizer | None, form: ChatFormat, questions: Sequence[str]
) -> tuple[list[np.ndarray], int]:
    """The ids of questions in a chat template, int32 [length] each, and how many tokens can follow the longest."""
    assert isinstance(tokenizer, BpeTokenizer | ByteTokenizer), "chats are written with a tokenizer.json"
    decoder, template = decoder_of(sharded_model.model), compile_template(form, today=datetime.date.today())
    texts = [prompt_text(template, [{"role": "user", "content": question}]) for question in questions]
    encoded = [found.ids for found in chat_encoder(tokenizer).encode(texts)]
    return encoded, room_for_new_tokens(decoder, max(map(len, encoded)))


def answer_ends(form: ChatFormat, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids at which an answer ends: those of the template, and the end of text, after which a document begins."""
    end = tokenizer.end_of_text
    return frozenset([*form.stop, *(() if end is None else (end,))])
