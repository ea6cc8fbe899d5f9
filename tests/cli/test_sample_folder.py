"""`jaxtrain sample` of published folders: a decoder whose tokenizer begins texts, an encoder-decoder, an adapter."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import jaxtrain as jt
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.inference.generate import generate_ids

PUBLISHED = Path(__file__).resolve().parents[1] / "interop" / "published"
# Of the fixtures: T5 ends texts with 1, Llama begins them with 1.
SPECIAL = {"t5": "$A </s>", "llama": "<s> $A"}


@pytest.fixture
def published(tmp_path):
    """Copies a model of the fixtures and gives it a tokenizer of words, with special tokens around a text."""

    def copy(name):
        folder = tmp_path / name
        shutil.copytree(PUBLISHED / name, folder)
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        sign = SPECIAL[name].replace("$A", "").strip()
        vocab = {"<pad>": 0, sign: 1, **{f"w{i}": i for i in range(2, size)}}
        made = Tokenizer(models.WordLevel(vocab, unk_token="w2"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue] a setter
        made.add_special_tokens(["<pad>", sign])
        made.post_processor = processors.TemplateProcessing(single=SPECIAL[name], special_tokens=[(sign, 1)])  # pyright: ignore[reportAttributeAccessIssue] a setter
        made.save(str(folder / "tokenizer.json"))
        return folder

    return copy


def sample(cli, folder, *words):
    answer = cli("sample", str(folder), "-p", "w5 w6 w7", "-n", "6", "--temperature", "0", "--emulate", "8", *words)
    assert answer.code == 0, answer.err
    return answer.out


@pytest.mark.long
def test_a_prompt_of_a_decoder_begins_as_its_tokenizer_says(published, cli):
    folder = published("llama")
    base = jt.load_pretrained(folder)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    sharded = jt.shard_model(base.model, mesh=jt.make_mesh(devices=jax.devices()[:1]))
    new = generate_ids(
        sharded, base.params, [np.array([1, 5, 6, 7], np.int32)], new_tokens=6, sampling=jt.Sampling(temperature=0)
    )[0]
    # Special tokens (ids 0 and 1) that the model writes are not shown.
    shown = [5, 6, 7, *(token for token in new.tolist() if token > 1)]
    assert sample(cli, folder) == tokenizer.decode(shown) + "\n"
    assert sample(cli, folder, "--stream") == tokenizer.decode(shown) + "\n"
    everything = sample(cli, folder, "--special-tokens")
    assert everything == tokenizer.decode([5, 6, 7, *new.tolist()]) + "\n"


@pytest.mark.long
def test_an_encoder_decoder_writes_its_output(published, cli):
    folder = published("t5")
    base = jt.load_pretrained(folder)
    sharded = jt.shard_model(base.model, mesh=jt.make_mesh(devices=jax.devices()[:1]))
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    greedy = jt.Sampling(temperature=0)
    expected = jt.generate_text(sharded, base.params, tokenizer, ["w5 w6 w7"], new_tokens=6, sampling=greedy)[0]
    assert sample(cli, folder) == expected + "\n"
    assert sample(cli, folder, "--stream") == expected + "\n"
    assert sample(cli, folder, "--beams", "1") == expected + "\n"


WRONG = {
    "a step": (("--step", "1"), "--step 1 is for runs"),
    "a question": (("--chat", "Why?"), "has no chat template"),
}


@pytest.mark.long
@pytest.mark.parametrize(("words", "said"), WRONG.values(), ids=WRONG)
def test_what_a_folder_does_not_have_is_one_line(published, cli, words, said):
    asked = words if "--chat" in words else ("-p", "a", *words)
    answer = cli("sample", str(published("llama")), *asked)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


def test_a_folder_without_a_tokenizer_is_one_line(cli):
    answer = cli("sample", str(PUBLISHED / "llama"), "-p", "a")
    assert (answer.code, answer.out) == (2, "")
    assert "has no tokenizer.json" in answer.err
    answer = cli("sample", str(PUBLISHED / "none"), "-p", "a")
    assert "no run at" in answer.err
