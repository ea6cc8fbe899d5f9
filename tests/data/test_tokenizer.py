"""Tokenizers: round trips, determinism, files."""

import re

import numpy as np
import pytest

from jaxtrain.config.data import TokenizerConfig
from jaxtrain.data import Tokenizer, build_tokenizer, load_tokenizer
from jaxtrain.data.tokenizer import _PIECE_CHARACTERS, BpeTokenizer, encode_all, tokenizer_sha256
from jaxtrain.errors import DataError

TEXTS = [
    "the cat sat on the mat\n",
    "naïve 東京 🙂\n\n  indented\ttab",
    "",
    "the <|endoftext|> is text here",
    "\x00\x7f",
]


def make(kind: str) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(kind=kind, vocab_size=300), TEXTS)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_decoding_undoes_encoding(kind, text):
    tokenizer = make(kind)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_of_text not in ids.tolist()


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_a_saved_tokenizer_is_the_same_tokenizer(kind, tmp_path):
    tokenizer = make(kind)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = build_tokenizer(TokenizerConfig(kind="file", path=str(path)), [])
    assert type(loaded) is type(load_tokenizer(path)) is type(tokenizer)
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    assert tokenizer_sha256(loaded) == tokenizer_sha256(tokenizer)
    for text in TEXTS:
        np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_decode_never_raises(kind):
    tokenizer = make(kind)
    odd = [-1, 0xFF, 0xC3, 10**9, 65]
    assert "\ufffd" in tokenizer.decode(odd)
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode(np.array([0], np.int32))


def test_bpe_training_is_deterministic():
    assert tokenizer_sha256(make("bpe")) == tokenizer_sha256(make("bpe"))


def test_cutting_a_long_document_leaves_its_ids_unchanged():
    tokenizer = make("bpe")
    assert isinstance(tokenizer, BpeTokenizer)
    text = "the cat\nsat  \n\n on\tthe mat, 12 times\n" * (3 * _PIECE_CHARACTERS // 30)
    whole = tokenizer._model.encode(text, add_special_tokens=False).ids
    (pieces,) = encode_all(tokenizer, [text])
    np.testing.assert_array_equal(pieces, whole)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.json", None, r"tokenizer .*missing\.json does not exist; the nearest existing path is .*"),
        ("empty.json", "", r"tokenizer .*empty\.json is empty; give a file with content"),
        ("text.json", "hello", r"tokenizer .*text\.json is not JSON \(.*\); give a tokenizer\.json"),
        ("other.json", '{"a": 1}', r"tokenizer .*other\.json is no tokenizer of the tokenizers library \(.*\)"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as error:
        load_tokenizer(tmp_path / name)
    assert re.fullmatch(message, str(error.value)), str(error.value)


def test_kind_file_needs_a_path():
    with pytest.raises(DataError, match=r"data\.tokenizer\.path is null"):
        build_tokenizer(TokenizerConfig(kind="file"), [])
