"""Prompts that a model cannot read are refused, and not read as others."""

import functools
import io
from typing import Any

import jax
import numpy as np
import pytest
from scripted import CHAT, TOKENIZER
from tokenizers import Tokenizer, models

import jaxtrain as jt
from jaxtrain.commands.sample import _prompts
from jaxtrain.data.chat.formats import ChatFormat
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference.beam import beam_search
from jaxtrain.inference.chat import answer_questions
from jaxtrain.inference.continued import continue_texts
from jaxtrain.inference.generate import generate_ids
from jaxtrain.inference.server.embeddings import embedding_call
from jaxtrain.inference.server.prompts import PromptReader
from jaxtrain.inference.server.refused import RefusedError

GREEDY = jt.Sampling(temperature=0)
GROUP = {"kind": "transformer", "num_layers": 1, "embed_dim": 8, "num_heads": 2, "max_sequence_length": 16}
WRONG = {
    "an id beyond the vocabulary": ([[1, 2], [3, 40]], "token 40, but the model's vocabulary has 40"),
    "a negative id": ([[1, -2]], "token -2"),
    "an empty prompt": ([[1], []], "at least one prompt and token"),
    "no prompt": ([], "at least one prompt and token"),
}


@pytest.fixture(scope="module")
def opened() -> Any:
    """A model of 40 ids, and its parameters as shapes: nothing is computed."""
    model = jt.build_model(GROUP, input_shape=(16,), vocab_size=40)
    sharded = jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[:1]))
    return sharded, sharded.abstract_params


@pytest.mark.parametrize(("prompts", "said"), WRONG.values(), ids=WRONG)
def test_no_prompt_is_read_as_another(opened, prompts, said):
    (model, params), encoded = opened, [np.array(ids, np.int32) for ids in prompts]
    with pytest.raises(ConfigError, match=said):
        generate_ids(model, params, encoded, new_tokens=2, sampling=GREEDY)
    with pytest.raises(ConfigError, match=said):
        beam_search(model, params, encoded, beams=2, new_tokens=2)


def test_a_text_of_another_tokenizer_is_refused(opened):
    with pytest.raises(ConfigError, match="use the tokenizer that it was trained with"):
        jt.generate_text(*opened, ByteTokenizer(), ["zz"], new_tokens=2, sampling=GREEDY)


def test_a_text_to_embed_is_refused_too():
    """As ids are, and texts that are to be continued."""
    reader = PromptReader(TOKENIZER, CHAT, vocab_size=100)
    for given in ("zz", [122]):
        with pytest.raises(RefusedError, match="input holds 122, which is no token id; use 0 to 99"):
            embedding_call({"model": "m", "input": given}, reader, served="m", length=8)


CALLS = {
    "text": functools.partial(jt.generate_text, new_tokens=2),
    "default length": functools.partial(continue_texts, new_tokens=None, stop=(), beams=None),
    "beams": functools.partial(continue_texts, new_tokens=None, stop=(), beams=2),
    "chat": lambda model, params, tokenizer, texts, **options: answer_questions(
        model, params, tokenizer, ChatFormat("{{ messages[0].content }}", "x", {}, (0,)), texts, new_tokens=2, **options
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_halves_of_characters_are_one_line(opened, call):
    """An argument of the command line that is not UTF-8 is such a text; the tokenizers library raises a TypeError."""
    tokenizer = BpeTokenizer(Tokenizer(models.BPE({"a": 0}, [])))
    with pytest.raises(ConfigError, match=r"the prompt 'a\\udcff' holds what is no character; give text in UTF-8"):
        call(*opened, tokenizer, ["a\udcff"], sampling=GREEDY, seed=0)


def test_standard_input_that_is_no_text_is_one_line(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    with pytest.raises(ConfigError, match="standard input is no text: byte 1 is not UTF-8"):
        _prompts(None)
