"""The tokenizer of a GGUF file gives the ids of the published one; what is not read is one line."""

import json
from pathlib import Path

import pytest
from gguf_files import gguf_bytes
from tokenizers import Tokenizer

from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.errors import CheckpointError, DataError
from jaxtrain.published.gguf_tokenizer import tokenizer_files

PATH = Path("some.gguf")
PIECES = json.loads(Path(__file__).with_name("gguf_pieces.json").read_text(encoding="utf-8"))
# Byte-level BPE: bytes are spelled as GPT-2 does (Ġ is a space, Ċ a newline).
TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *"abcde0123456789 ĠĊ,'",
    "ab",
    "abc",
    "Ġa",
    "Ġab",
    "12",
    "123",
    "<tool>",
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
        ("qwen2", ["abc", "Ġab", "Ġ", "1", "2", "3"]),
    ],
)
def test_each_rule_divides_text_as_published(pre, expected):
    assert tokens_of("abc ab 123", pre=pre) == expected


def test_special_tokens_are_found_in_text():
    expected = ["<|im_start|>", "a", "Ċ", "b", "<|im_end|>", "<tool>"]
    assert tokens_of("<|im_start|>a\nb<|im_end|><tool>") == expected
    added = json.loads(tokenizer_files(PATH, BYTE_PAIRS)["tokenizer.json"])["added_tokens"]
    assert {one["content"]: one["special"] for one in added} == {
        "<|endoftext|>": True,
        "<|im_start|>": True,
        "<|im_end|>": True,
        "<tool>": False,
    }


@pytest.mark.parametrize(("adds", "expected"), [(True, ["<|im_start|>", "a"]), (False, ["a"])])
def test_a_first_token_is_added_where_the_file_says_so(adds, expected):
    assert tokens_of("a", add_bos_token=adds) == expected


def test_special_tokens_and_chat_template_are_kept():
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    files = tokenizer_files(PATH, BYTE_PAIRS | {"tokenizer.chat_template": template})
    settings = json.loads(files["tokenizer_config.json"])
    assert settings["chat_template"] == template
    names = ("bos_token", "eos_token", "pad_token")
    assert [settings[name] for name in names] == ["<|im_start|>", "<|im_end|>", "<|im_end|>"]
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_a_file_without_a_tokenizer_has_no_files():
    assert tokenizer_files(PATH, {}) == {}


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
    "a kind": (dict(model="t5"), "tokenizer.ggml.model is 't5'; gpt2 (byte-level BPE) and llama"),
    "a rule": (
        dict(pre="tekken"),
        "tokenizer.ggml.pre is 'tekken'; the ways to divide text into words that are known are",
    ),
    "no tokens": (dict(tokens=None), "tokenizer.ggml.tokens is not a list of tokens"),
    "a token twice": (dict(tokens=["a", "a"]), "tokenizer.ggml.tokens holds a token twice"),
    "no merges": (dict(merges=None), "tokenizer.ggml.merges is missing"),
    "a merge of strangers": (dict(merges=["a z"]), "the merge 'a z' is not of tokens"),
    "few types": (
        dict(token_type=[1]),
        f"tokenizer.ggml.token_type does not hold one number per token ({len(TOKENS)})",
    ),
    "no scores": (dict(model="llama"), "tokenizer.ggml.scores does not hold one number per token"),
    "an id": (dict(eos_token_id=999), f"tokenizer.ggml.eos_token_id is 999, but there are {len(TOKENS)} tokens"),
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
    # What a run saves of it is a tokenizer.json of the same ids.
    tokenizer.save(tmp_path / "tokenizer.json")
    assert list(load_tokenizer(tmp_path / "tokenizer.json").encode("abc ab")) == list(ids)


def test_a_gguf_file_without_a_tokenizer_is_one_line(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({}, {}))
    with pytest.raises(DataError, match=r"m\.gguf holds no tokenizer; give the model's published tokenizer\.json"):
        load_tokenizer(path)
