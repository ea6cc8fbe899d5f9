"""Tokenizers: round trips, determinism, files, and the token that a config or a file names as the end of text."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Model

from jaxtrain.config.data import JsonlData, TokenizerConfig
from jaxtrain.data import Tokenizer, build_tokenizer, load_tokenizer, open_data, prepare_tokens
from jaxtrain.data.tokenizer import special_ids, tokenizer_sha256
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
def test_decoding_undoes_encoding(kind):
    tokenizer = make(kind)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert (ids.dtype, ids.ndim) == (np.int32, 1)
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; the nearest existing path is"),
        ('{"a": 1}', "is not a tokenizer of the tokenizers library"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=rf"^tokenizer .*a\.json {message}"):
        load_tokenizer(tmp_path / "a.json")


def published(folder, names=("<|eot|>",), **beside):
    """A folder with a tokenizer.json whose special tokens have these names, and with files beside it."""
    folder.mkdir()
    made = build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=280), ["hello world " * 50])
    model = Model.from_str(made.to_json().replace("<|endoftext|>", names[0]))
    model.add_special_tokens(list(names[1:]))
    model.save(str(folder / "tokenizer.json"))
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"


EOT = {"tokenizer_config": {"eos_token": "<|eot|>"}}
# Names of tokens, files beside the tokenizer, data.tokenizer.end, what ends a document; None: a newline.
ENDS = {
    "beside": (("<|eot|>",), EOT, None, "<|eot|>"),
    "beside, the older file": (("<|eot|>",), {"special_tokens_map": {"eos_token": "<|eot|>"}}, None, "<|eot|>"),
    "config": (("<|eot|>", "<|x|>"), EOT, "<|x|>", "<|x|>"),
    "beside, before the usual one": (("<|endoftext|>", "<|eot|>"), EOT, None, "<|eot|>"),
    "nobody": (("<|eot|>",), {}, None, None),
}


def documents(tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps({"text": f"hello world {i}"}) + "\n" for i in range(30)))
    return str(path)


@pytest.mark.parametrize("name", ENDS)
def test_documents_end_as_config_file_and_names_say(name, tmp_path):
    names, beside, given, end = ENDS[name]
    file = published(tmp_path / "tokenizer", names, **beside)
    tokenizer = {"kind": "file", "path": str(file), **({} if given is None else {"end": given})}
    config = {"kind": "jsonl", "path": documents(tmp_path), "tokenizer": tokenizer, "validation_fraction": 0.0}
    data = open_data(config, sequence_length=8)
    made = data.tokenizer
    wanted = made.encode("\n")[0] if end is None else made.token_id(end)
    assert made.end_of_text == (None if end is None else wanted)
    stream = np.concatenate([data.train[i]["inputs"] for i in range(len(data.train))])
    assert (stream == wanted).sum() >= 25
    # The ids of a text do not depend on it; the rows do.
    usual = build_tokenizer(TokenizerConfig(kind="file", path=str(published(tmp_path / "bare", names))), [])
    assert data.fingerprint.get("end_of_text") == (None if made.end_of_text == usual.end_of_text else wanted)


def test_shards_and_mixtures_keep_the_end(tmp_path):
    file = published(tmp_path / "tokenizer", **EOT)
    config = {"kind": "jsonl", "path": documents(tmp_path), "tokenizer": {"kind": "file", "path": str(file)}}

    def prepared(name, tokenizer):
        parsed = JsonlData(path=config["path"], tokenizer=TokenizerConfig(kind="file", path=str(tokenizer)))
        return prepare_tokens(parsed, tmp_path / name)

    assert prepared("shards", file)["end_of_text"] is not None
    shards = {"kind": "tokens", "path": str(tmp_path / "shards")}
    text = open_data(config, sequence_length=8)
    found = open_data(shards, sequence_length=8)
    assert found.tokenizer.end_of_text == text.tokenizer.end_of_text is not None
    np.testing.assert_array_equal(found.train[3]["inputs"], text.train[3]["inputs"])
    of_shards = {"kind": "file", "path": str(tmp_path / "shards" / "tokenizer.json")}
    parts = [{"source": shards}, {"source": {"kind": "jsonl", "path": config["path"]}}]
    open_data({"kind": "mixture", "components": parts, "tokenizer": of_shards}, sequence_length=8)
    # The same tokenizer without the file beside it ends documents otherwise.
    bare = published(tmp_path / "bare")
    assert prepared("other", bare)["end_of_text"] is None
    parts[0]["source"] = {"kind": "tokens", "path": str(tmp_path / "other")}
    with pytest.raises(DataError, match=r"other has another tokenizer or end of document"):
        open_data({"kind": "mixture", "components": parts, "tokenizer": of_shards}, sequence_length=8)


def test_the_frames_of_encoders_are_the_same_where_a_run_kept_its_tokenizer(tmp_path):
    """A run keeps the end of text beside its tokenizer, which is no name of a frame."""
    beside = {"special_tokens_map": {"cls_token": "<s>", "sep_token": "</s>", "eos_token": "</s>"}}
    file = published(tmp_path / "tokenizer", ("[CLS]", "[SEP]", "<s>", "</s>"), **beside)
    tokenizer = load_tokenizer(file)
    trained = special_ids(tokenizer, TokenizerConfig(kind="file", path=str(file)))
    (tmp_path / "run").mkdir()
    tokenizer.save(tmp_path / "run" / "tokenizer.json")
    kept = TokenizerConfig(kind="file", path=str(tmp_path / "run" / "tokenizer.json"))
    assert special_ids(load_tokenizer(tmp_path / "run" / "tokenizer.json"), kept) == trained
    assert trained.start == tokenizer.token_id("[CLS]")


REPEATED = {"type": "Split", "pattern": {"Regex": "(a+)+$|(a|aa)+b"}, "behavior": "Isolated", "invert": False}
WORDS = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}
# What is other in the file -> what its line says.
FAILING = {
    "an expression that backtracks": ({"pre_tokenizer": REPEATED}, "the tokenizer fails on a text"),
    "no unknown token": ({"model": {**WORDS, "vocab": {"b": 0}}}, r"the tokenizer fails on a text.*\[UNK\]"),
    "an id of 2^31": ({"model": {**WORDS, "vocab": {"a": 2**31}}}, r"a\.json is not .*an id of 2147483648"),
}


@pytest.mark.parametrize(("change", "message"), FAILING.values(), ids=FAILING)
def test_a_file_that_fails_on_a_text_is_one_line(tmp_path, change, message):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**json.loads(make("bpe").to_json()), **change}))  # pyright: ignore[reportAttributeAccessIssue] a BPE
    with pytest.raises(DataError, match=rf"^[^\n]*{message}[^\n]*$"):
        load_tokenizer(path).encode("a" * 40 + "c")
