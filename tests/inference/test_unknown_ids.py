"""Prompts that a model cannot read are refused, and not read as others."""

from typing import Any

import jax
import numpy as np
import pytest
from scripted import CHAT, TOKENIZER

import jaxtrain as jt
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference.beam import beam_search
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
    encoded = [np.array(ids, np.int32) for ids in prompts]
    with pytest.raises(ConfigError, match=said):
        generate_ids(*opened, encoded, new_tokens=2, sampling=GREEDY)
    with pytest.raises(ConfigError, match=said):
        beam_search(*opened, encoded, beams=2, new_tokens=2)


def test_a_text_of_another_tokenizer_is_refused(opened):
    with pytest.raises(ConfigError, match="use the tokenizer that it was trained with"):
        jt.generate_text(*opened, ByteTokenizer(), ["zz"], new_tokens=2, sampling=GREEDY)


def test_a_text_to_embed_is_refused_too():
    """As ids are, and texts that are to be continued."""
    reader = PromptReader(TOKENIZER, CHAT, vocab_size=100)
    for given in ("zz", [122]):
        with pytest.raises(RefusedError, match="input holds 122, which is no token id; use 0 to 99"):
            embedding_call({"model": "m", "input": given}, reader, served="m", length=8)
