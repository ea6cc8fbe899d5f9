"""Tokenizers: round trips, determinism, files."""

import re

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Model

from jaxtrain.config.data import TokenizerConfig
from jaxtrain.data import Tokenizer, build_tokenizer, load_tokenizer
from jaxtrain.data.tokenizer import _PIECE_CHARACTERS, BpeTokenizer, encode_all, tokenizer_sha256
from jaxtrain.errors import ConfigError, DataError

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


# Each ends a piece of a long document in another way, or ties a newline to its neighbours.
SPLITTERS = {
    "byte_level": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "byte_level_prefix_space": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "byte_level_no_regex": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    "split_and_byte_level": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[a-z]+|\d{1,3}|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "metaspace": pre_tokenizers.Metaspace(),
    "none": None,
}
ADDED = {
    "": [],
    "strips_right": [AddedToken("cat", rstrip=True, normalized=False)],
    "strips_left": [AddedToken("sat", lstrip=True, normalized=False)],
    "holds_newline": [AddedToken("cat\nsat", normalized=False)],
}


@pytest.mark.parametrize(
    ("splitter", "normalizer", "added"),
    [
        *((name, None, "") for name in SPLITTERS),
        ("byte_level", normalizers.Prepend("_"), ""),
        ("byte_level", normalizers.Strip(), ""),
        *(("byte_level", None, name) for name in ADDED if name),
    ],
    ids=str,
)
def test_a_long_document_has_the_ids_of_the_whole_under_every_option(tmp_path, splitter, normalizer, added):
    # Every newline, and so every place to divide it, is between "cat" and "sat".
    text = "sat on the mat, 12 times, the cat\n" * (2 * _PIECE_CHARACTERS // 30)
    model = Model(models.BPE(unk_token="[UNK]"))
    if SPLITTERS[splitter] is not None:
        model.pre_tokenizer = SPLITTERS[splitter]
    if normalizer is not None:
        model.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["[UNK]"], show_progress=False
    )
    model.train_from_iterator([text[:1000]], trainer)
    model.add_tokens(ADDED[added])
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    whole = model.encode(text, add_special_tokens=False).ids
    np.testing.assert_array_equal(encode_all(tokenizer, [text])[0], whole)


def test_a_file_with_bpe_dropout_gives_the_same_ids_every_time(tmp_path):
    model = Model.from_str(make("bpe").to_json())
    model.model.dropout = 0.5
    model.save(str(tmp_path / "tokenizer.json"))
    text = "the cat sat on the mat\n" * 50
    np.testing.assert_array_equal(load_tokenizer(tmp_path / "tokenizer.json").encode(text), make("bpe").encode(text))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.json", None, r"tokenizer .*missing\.json does not exist; the nearest existing path is .*"),
        ("empty.json", "", r"tokenizer .*empty\.json is empty; give a file with content"),
        ("text.json", "hello", r"tokenizer .*text\.json is not JSON \(.*\); give a tokenizer\.json"),
        ("other.json", '{"a": 1}', r"tokenizer .*other\.json is not a tokenizer of the tokenizers library \(.*\)"),
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
    with pytest.raises(ConfigError, match=r"vocab_size=258 has no room for .* 2 special tokens; set it to 259 or more"):
        build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=258), [], special=("<a>", "<b>"))
