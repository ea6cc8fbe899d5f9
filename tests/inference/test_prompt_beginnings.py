"""One rule for the beginning of a text: `sample`, `serve` and `generate_text` read a prompt alike."""

import json

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import jaxtrain as jt
from jaxtrain.data.chat.templates import files_beside
from jaxtrain.data.tokenizer import BpeTokenizer
from jaxtrain.errors import CheckpointError
from jaxtrain.inference import generate
from jaxtrain.inference.prompts import encode_prompts
from jaxtrain.inference.published import read_texts
from jaxtrain.inference.server.bodies import PromptReader

GROUP = {
    "kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 16,
    "vocab_size": 258,
}  # fmt: skip
CHATS = {"kind": "chat", "template": "", "label": "x", "tokens": {}, "stop": [257]}
# What run.json says -> whether a beginning of text stands before a prompt.
RUNS = {
    "imported": ({"status": "imported", "data": {"reading": None}}, True),
    "trained on plain text": ({"status": "done", "data": {"reading": None}}, False),
    "trained on chats": ({"status": "done", "data": {"reading": CHATS}}, True),
}


@pytest.fixture(scope="module")
def model():
    return jt.build_model(GROUP, input_shape=(16,))


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes in the usual signs, and a published post-processor that puts <s> before a text."""
    signs = {sign: i for i, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=signs, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue] a setter
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] a setter
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])  # pyright: ignore[reportAttributeAccessIssue] a setter
    return BpeTokenizer(made)


def read_everywhere(model, tokenizer, special) -> list[list[int]]:
    """The ids of one prompt as each of the doors reads it."""
    (encoded,), _ = encode_prompts(model, tokenizer, ["hi"], add_special_tokens=special.added)
    served = PromptReader(tokenizer, None, special)
    return [encoded.tolist(), list(served.of_text("hi"))]


@pytest.mark.parametrize(("info", "added"), RUNS.values(), ids=RUNS)
def test_of_a_run(model, tokenizer, tmp_path, info, added):
    plain = tokenizer.encode("hi").tolist()
    (tmp_path / "run.json").write_text(json.dumps({"config": {}, **info}))
    run = jt.open_run(tmp_path)
    run.tokenizer = tokenizer
    for found in read_everywhere(model, tokenizer, run.special):
        assert found == ([256, *plain] if added else plain)


ENDS = {
    "generation_config.json": {
        "generation_config.json": {"eos_token_id": [257, 10]},
        "config.json": {"eos_token_id": 3},
    },
    "config.json": {"config.json": {"eos_token_id": [257, 10], "text_config": {"eos_token_id": 3}}},
    "one id, beside other settings": {"generation_config.json": {"top_p": 0.9}, "config.json": {"eos_token_id": 10}},
    "of a tower": {"config.json": {"text_config": {"eos_token_id": 10}, "eos_token_id": None}},
}


@pytest.mark.parametrize("files", ENDS.values(), ids=ENDS)
def test_of_a_published_folder(model, tokenizer, tmp_path, files):
    """Its files name the tokens, and the ids at which it stops."""
    tokenizer.save(tmp_path / "tokenizer.json")
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<none such>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    for name, settings in files.items():
        (tmp_path / name).write_text(json.dumps(settings))
    _, special = read_texts(files_beside(tmp_path / "tokenizer.json"), tokenizer, where="", added=True)
    assert read_everywhere(model, tokenizer, special) == [[256, *tokenizer.encode("hi").tolist()]] * 2
    reader = PromptReader(tokenizer, None, special)
    assert reader.stop_tokens == {257, 10}
    assert reader.of_text("hi", add_special_tokens=False) == tuple(tokenizer.encode("hi"))


def test_special_tokens_that_a_model_writes_are_hidden(model, tokenizer, monkeypatch):
    """They are the likeliest tokens of a model whose logits say so; a stop is shown by neither choice."""

    class Found:
        tokens = np.array([[104, 256, 105, 257, 104]], np.int32)
        counts = np.array([5])

    monkeypatch.setattr(generate, "generation_pieces", lambda *_, **__: [Found])
    sharded = jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[:1]))

    def text(**options):
        greedy = jt.Sampling(temperature=0)
        return jt.generate_text(sharded, {}, tokenizer, ["a"], new_tokens=5, sampling=greedy, **options)[0]

    letters = tokenizer.decode([104]), tokenizer.decode([105])
    assert text() == "a" + "".join(letters)
    assert text(skip_special_tokens=False) == f"a{letters[0]}<s>{letters[1]}"
    assert text(stop_tokens=[105]) == "a" + letters[0]


@pytest.mark.parametrize(
    "files",
    [{"eos_token_id": [[1]]}, {"eos_token_id": "x"}, {"chat_template": [5]}],
    ids=str,
)
def test_files_that_say_no_tokens_are_one_line(tokenizer, tmp_path, files):
    tokenizer.save(tmp_path / "tokenizer.json")
    name = "tokenizer_config.json" if "chat_template" in files else "config.json"
    (tmp_path / name).write_text(json.dumps(files))
    with pytest.raises(CheckpointError, match=r"^what is beside the tokenizer of here is missing or damaged [^\n]*$"):
        read_texts(files_beside(tmp_path / "tokenizer.json"), tokenizer, where="here", added=True)
