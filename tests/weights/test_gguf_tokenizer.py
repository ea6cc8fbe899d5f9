"""The tokenizer of a GGUF file gives the ids of the published one; what is not read is one line."""

import json
from pathlib import Path

import pytest
from gguf_files import gguf_bytes
from tokenizers import Tokenizer

from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.errors import CheckpointError
from jaxtrain.formats.gguf_tokenizer import tokenizer_files

PATH = Path("some.gguf")
PIECES = json.loads(Path(__file__).with_name("gguf_pieces.json").read_text(encoding="utf-8"))
# Byte-level BPE: bytes are spelled as GPT-2 does (Ġ is a space, Ċ a newline).
TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcde0123456789 ĠĊ,'"),
    *("ab", "abc", "Ġa", "Ġab", "12", "123", "<tool>"),
]
BYTE_PAIRS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": ["a b", "ab c", "Ġ a", "Ġ ab", "1 2", "12 3"],
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(TOKENS) - 4), 4],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
}


def tokens_of(text, **changed):
    metadata = BYTE_PAIRS | {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    tokenizer = Tokenizer.from_str(tokenizer_files(PATH, metadata)["tokenizer.json"])
    found = tokenizer.encode(text)
    assert tokenizer.decode(found.ids, skip_special_tokens=False).endswith(text)
    return found.tokens


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["abc", "Ġab", "Ġ", "1", "2", "3"]),  # Digits are words of their own, and so is the space before.
        ("gpt-2", ["abc", "Ġab", "Ġ", "123"]),
        ("llama-bpe", ["abc", "Ġab", "Ġ", "123"]),  # Up to three digits are a word.
    ],
)
def test_each_rule_divides_text_as_published(pre, expected):
    assert tokens_of("abc ab 123", pre=pre, add_bos_token=False) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param({"add_bos_token": True}, ["<|im_start|>", "a"], id="a beginning"),
        pytest.param({"add_bos_token": False, "pre": "llama-bpe"}, ["a"], id="none"),
        pytest.param({"pre": "llama-bpe"}, ["<|im_start|>", "a"], id="Llama 3 without the key"),
        pytest.param({"add_eos_token": True}, ["a", "<|im_end|>"], id="an end"),
    ],
)
def test_tokens_around_a_text_are_those_of_the_file(said, expected):
    metadata = BYTE_PAIRS | {f"tokenizer.ggml.{key}": value for key, value in said.items()}
    assert Tokenizer.from_str(tokenizer_files(PATH, metadata)["tokenizer.json"]).encode("a").tokens == expected


# Gemma ends its texts with <eos> and its answers with <end_of_turn>.
TURNS = ["<eos>", "<end_of_turn>", "<|eom_id|>", "<|end|>", "a"]


@pytest.mark.parametrize(
    ("said", "kinds", "ends"),
    [
        pytest.param({"eot_token_id": 3}, [3, 3, 1, 3, 1], [0, 3], id="the key stands before names"),
        pytest.param({}, [3, 3, 1, 1, 1], [0, 1], id="by its name"),
    ],
)
def test_a_model_stops_at_the_ends_of_texts_turns_and_messages(said, kinds, ends):
    given = {"model": "llama", "tokens": TURNS, "scores": [0.0] * 5, "token_type": kinds, "eos_token_id": 0, **said}
    files = tokenizer_files(PATH, {f"tokenizer.ggml.{key}": value for key, value in given.items()})
    assert json.loads(files["generation_config.json"])["eos_token_id"] == ends
    # What a template calls the end of text stays the end of text.
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<eos>"


def test_special_tokens_and_chat_template_are_kept():
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    more = {"tokenizer.chat_template": template, "tokenizer.ggml.unknown_token_id": 0}
    files = tokenizer_files(PATH, BYTE_PAIRS | more)
    settings = json.loads(files["tokenizer_config.json"])
    assert settings["chat_template"] == template
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    assert [settings[name] for name in names] == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def scored(prefix):
    model = PIECES["with prefix" if prefix else "without prefix"]
    metadata = {f"tokenizer.ggml.{key}": model[key] for key in ("tokens", "scores", "token_type")}
    settings = {"model": "llama", "add_space_prefix": prefix, "unknown_token_id": 0, "add_bos_token": False}
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in settings.items()}


@pytest.mark.parametrize("prefix", [True, False])
def test_scored_pieces_give_the_ids_of_sentencepiece(prefix):
    tokenizer = Tokenizer.from_str(tokenizer_files(PATH, scored(prefix))["tokenizer.json"])
    expected = PIECES["with prefix" if prefix else "without prefix"]["ids"]
    for text, ids in expected.items():
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids) == text


WRONG = {
    "a rule": (dict(pre="tekken"), "tokenizer.ggml.pre is tekken; supported: "),
    "an id": (dict(eos_token_id=999), "its tokenizer cannot be read"),
}


@pytest.mark.parametrize(("changed", "message"), WRONG.values(), ids=WRONG)
def test_what_is_not_read_is_one_line(changed, message):
    with pytest.raises(CheckpointError) as caught:
        tokenizer_files(PATH, BYTE_PAIRS | {f"tokenizer.ggml.{key}": value for key, value in changed.items()})
    assert message in str(caught.value)
    assert str(caught.value).startswith("some.gguf: ")
    assert "\n" not in str(caught.value)


def test_a_gguf_file_is_a_tokenizer_of_the_data(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(BYTE_PAIRS, {}))
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == len(TOKENS)
    ids = tokenizer.encode("abc ab")
    assert [TOKENS[i] for i in ids] == ["abc", "Ġab"]
