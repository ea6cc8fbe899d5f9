"""Answers of a model to questions, written and read by its chat template."""

import datetime
from collections.abc import Sequence

import numpy as np

from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.encoding import chat_encoder
from jaxtrain.data.chat.formats import ChatFormat
from jaxtrain.data.chat.masks import prompt_text
from jaxtrain.data.chat.templates import compile_template
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference.generate import generate_ids, room_for_new_tokens
from jaxtrain.inference.prompts import check_characters
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
        sharded_model: has a decoder.
        params: on any mesh; also quantized.
        tokenizer: turns texts into ids.
        form: how conversations are written.
        questions: what the user says; all are answered in one batch.
        new_tokens: tokens of an answer, at most; fewer where the model has not so many positions.
        sampling: how tokens are chosen.
        seed: of the random choices.

    Returns:
        The answers, without the token that ends them.

    Raises:
        ConfigError: the model cannot generate, a question exceeds its positions, or the template fails.
        DataError: the template refuses a question.
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
    room = room_for_new_tokens(decoder, max(map(len, encoded)))
    new_BT = generate_ids(
        sharded_model,
        params,
        encoded,
        new_tokens=max(1, min(new_tokens, room)),
        sampling=sampling,
        seed=seed,
        stop_tokens=form.stop,
    )
    return until_stop(new_BT, form, tokenizer)


def until_stop(new_BT: np.ndarray, form: ChatFormat, tokenizer: Tokenizer) -> list[str]:
    """Returns what was generated before the first stop token of each row.

    Args:
        new_BT: int32 [B, T].
        form: has the stop tokens.
        tokenizer: turns ids into text.
    """
    answers = []
    for new in new_BT:
        stop = np.flatnonzero(np.isin(new, form.stop))
        answers.append(tokenizer.decode(new[: stop[0] if len(stop) else None].tolist()))
    return answers
