"""Labelled, tagged and paired texts: special tokens, padding, classes, truncation, and files of three formats."""

import csv
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from jaxtrain.data import open_data
from jaxtrain.data.sources.texts import framed_texts, framed_tokens, framed_words
from jaxtrain.data.tokenizer import BpeTokenizer, load_tokenizer
from jaxtrain.errors import DataError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "man", "eats", "bread", "##s", "the", "dog", "sleep"]
CLS, SEP, PAD = 2, 3, 0


def write_bert(folder, *, post_processor=True):
    """A tokenizer.json as BERT's: WordPiece, [CLS] A [SEP] B [SEP]."""
    model = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer(lowercase=True)
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.add_special_tokens(WORDS[:5])
    if post_processor:
        model.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
        )
    path = folder / "tokenizer.json"
    model.save(str(path))
    return {"kind": "file", "path": str(path)}


def write_rows(folder, suffix, rows):
    """Rows (dicts) as a file of one format."""
    path = folder / f"rows{suffix}"
    if suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            joined = ({k: " ".join(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows)
            writer.writerows(joined)
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(rows), path)
    return str(path)


PAIRS = [
    {"text": "A man eats", "other": "the dogs", "label": "yes"},
    {"text": "the dog sleeps", "other": "a man", "label": "no"},
    {"text": "bread, with\na comma", "other": "eats", "label": "maybe"},
    {"text": "", "other": "dog", "label": "yes"},
]


@pytest.mark.parametrize(("suffix", "post_processor"), [(".csv", True), (".jsonl", False), (".parquet", True)])
def test_pairs_are_framed_and_padded(suffix, post_processor, tmp_path):
    config = {
        "kind": "labelled_text",
        "path": write_rows(tmp_path, suffix, PAIRS),
        "second_text": "other",
        "tokenizer": write_bert(tmp_path, post_processor=post_processor),
        "validation_fraction": 0.0,
    }
    data = open_data(config, sequence_length=10)
    rows = data.train.gather(np.argsort(data.train._numbers))  # in the order of the file
    inputs, targets = rows["inputs"], rows["targets"]
    assert inputs["tokens"][0].tolist() == [CLS, 5, 6, 7, SEP, 10, 11, 9, SEP, PAD]
    assert inputs["segments"][0].tolist() == [1] * 9 + [0]
    assert inputs["token_types"][0].tolist() == [0] * 5 + [1] * 4 + [0]
    assert inputs["tokens"][3].tolist() == [CLS, SEP, 11, SEP] + [PAD] * 6
    assert all(column.dtype == np.int32 for column in inputs.values())
    assert data.reading == {"kind": "labelled_text", "classes": ["maybe", "no", "yes"]}
    assert (targets.tolist(), targets.dtype, data.num_outputs) == ([2, 1, 0, 2], np.int32, 3)
    assert (data.vocab_size, data.input_shape, data.unit, data.validation) == (len(WORDS), (10,), "tokens", None)
    # The second row has 3 + 1 + 2 tokens and 3 special ones; the third one more than fit.
    assert "1 of 4 texts are longer than 10 tokens and truncated" not in data.description


def test_pairs_are_truncated_as_the_tokenizers_library_does(tmp_path):
    config = write_bert(tmp_path)
    model, tokens = Tokenizer.from_file(config["path"]), framed_tokens(load_tokenizer(config["path"]), None)
    pairs = [["a " * first, "dog " * second] for first in range(0, 9, 2) for second in range(9)]
    for length in (9, 10):
        model.enable_truncation(length, strategy="longest_first")
        column = framed_texts(tokens, pairs, sequence_length=length)[0]["tokens"]
        rows = column.take(np.arange(len(pairs)))
        for pair, row in zip(pairs, rows.tolist(), strict=True):
            expected = model.encode(*pair).ids
            assert row == [*expected, *[PAD] * (length - len(expected))], pair


def labelled(folder, rows, *, task=None, reading=None, length=16, **more):
    config = {"kind": "labelled_text", "path": write_rows(folder, ".jsonl", rows), "validation_fraction": 0.0, **more}
    return open_data(config, sequence_length=length, task=task, reading=reading)


def in_file_order(data):
    return data.train.gather(np.argsort(data.train._numbers))


def test_labels_are_numbered_by_value_and_as_the_run_did(tmp_path):
    rows = [{"text": "x", "label": label} for label in (10, 2, 2, True)]
    assert labelled(tmp_path, rows[:3]).reading["classes"] == ["2", "10"]
    rows = [{"text": "x", "label": "b"}, {"text": "y", "label": "c"}]
    known = {"kind": "labelled_text", "classes": ["a", "c", "b"]}
    assert in_file_order(labelled(tmp_path, rows, reading=known))["targets"].tolist() == [2, 1]
    with pytest.raises(DataError, match="has class 'd', which the run was not trained on"):
        labelled(tmp_path, [{"text": "x", "label": "d"}], reading=known)


def test_numbers_under_regression(tmp_path):
    data = labelled(tmp_path, [{"text": "x", "label": 0.5}, {"text": "y", "label": "-2"}], task="regression")
    targets = in_file_order(data)["targets"]
    assert (targets.tolist(), targets.dtype, data.num_outputs) == ([[0.5], [-2.0]], np.float32, 1)
    assert data.reading == {"kind": "labelled_text", "classes": None}


def test_a_file_of_its_own_for_evaluation(tmp_path):
    (tmp_path / "dev").mkdir()
    dev = write_rows(tmp_path / "dev", ".csv", [{"text": "x", "label": "b"}])
    data = labelled(tmp_path, [{"text": "x", "label": "a"}] * 3, validation_path=dev)
    assert (len(data.train), len(data.validation), data.reading["classes"]) == (3, 1, ["a", "b"])
    assert data.validation[0]["targets"] == 1


# Labels of the file for training and of that for evaluation, and the classes of both.
SAME_CLASSES = {
    "whole numbers as pandas writes them": (["3", "0"], ["3.0", "0.00"], ["0", "3"]),
    "truth values": (["True", "FALSE"], [True, False], ["false", "true"]),
    "versions": (["1.10", "1.1"], ["v1.0", "1.10"], ["1.1", "1.10", "v1.0"]),
}


@pytest.mark.parametrize("name", SAME_CLASSES)
def test_one_class_written_in_two_ways_is_one(name, tmp_path):
    labels, others, classes = SAME_CLASSES[name]
    (tmp_path / "dev").mkdir()
    dev = write_rows(tmp_path / "dev", ".jsonl", [{"text": "x", "label": label} for label in others])
    train = write_rows(tmp_path, ".csv", [{"text": "x", "label": label} for label in labels])
    data = open_data({"kind": "labelled_text", "path": train, "validation_path": dev}, sequence_length=16)
    assert data.reading["classes"] == classes


def test_truth_values_beside_numbers_are_one_line(tmp_path):
    rows = [{"text": "x", "label": label} for label in (0, 1, True, False)]
    with pytest.raises(DataError, match=r"truth values and numbers as classes \(true and 1\)"):
        labelled(tmp_path, rows)


def test_tags_of_one_class_in_two_ways_and_of_one_class_alone(tmp_path):
    rows = [{"words": "a b c", "tags": "0 1.0 1"}, {"words": "a b", "tags": "0.0 1"}]
    config = {"kind": "tagged_text", "path": write_rows(tmp_path, ".csv", rows), "validation_fraction": 0.0}
    assert open_data(config, sequence_length=16).reading["classes"] == ["0", "1"]
    config["path"] = write_rows(tmp_path, ".jsonl", [{"words": ["a", "b"], "tags": ["O", "O"]}] * 3)
    with pytest.raises(DataError, match=r"rows.jsonl has rows of one class \('O'\)"):
        open_data(config, sequence_length=16)


def test_numbers_of_texts_keep_their_differences(tmp_path):
    rows = [{"text": "x" * i, "label": 2e9 + i} for i in range(9)]
    data = labelled(tmp_path, rows, task="regression")
    targets = in_file_order(data)["targets"][:, 0]
    assert (targets + np.float64(data.reading["target_offset"][0])).tolist() == [row["label"] for row in rows]


TAGGED = [
    {"words": ["the", "dogs", "sleep"], "tags": ["O", "B", "O"]},
    {"words": ["bread"], "tags": ["B"]},
]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_the_first_token_of_a_word_has_its_tag(suffix, tmp_path):
    config = {
        "kind": "tagged_text",
        "path": write_rows(tmp_path, suffix, TAGGED),
        "tokenizer": write_bert(tmp_path),
        "validation_fraction": 0.0,
    }
    data = open_data(config, sequence_length=7)
    rows = in_file_order(data)
    assert rows["inputs"]["tokens"].tolist() == [[CLS, 10, 11, 9, 12, SEP, PAD], [CLS, 8, SEP, PAD, PAD, PAD, PAD]]
    assert rows["targets"].tolist() == [[-100, 1, 0, -100, 1, -100, -100], [-100, 0] + [-100] * 5]
    assert (data.num_outputs, data.reading["classes"]) == (2, ["B", "O"])
    short = open_data(config, sequence_length=4)
    assert in_file_order(short)["targets"][0].tolist() == [-100, 1, 0, -100]
    assert "1 of 2 rows are longer than 4 tokens and truncated" in short.description


PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
SENTENCES = ["Bob went to Paris", "the cat sat", "Bob sat to the cat"] * 5
# Normalizer, pre-tokenizer, whether it adds the space before a word by itself, so that the tokens are the library's.
SPACES = {
    "as Llama's": (PREPEND, None, True),
    "bytes": (None, pre_tokenizers.ByteLevel(add_prefix_space=False), False),
}


@pytest.mark.parametrize("name", SPACES)
def test_a_word_has_one_space_before_it(name):
    normalizer, splitter, adds_space = SPACES[name]
    model = Tokenizer(models.BPE(unk_token="<unk>"))
    if normalizer is not None:
        model.normalizer = normalizer
    if splitter is not None:
        model.pre_tokenizer = splitter
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>"], show_progress=False)
    model.train_from_iterator(SENTENCES, trainer)
    words = ["Bob", "went", "to", "Paris"]
    found = framed_words(framed_tokens(BpeTokenizer(model), None), [words], sequence_length=64)
    # Without a space of its own, the library takes a word as one at the beginning of a text; the row has running text.
    apart = words if adds_space else ["Bob", " went", " to", " Paris"]
    expected = [model.encode(word, add_special_tokens=False).ids for word in apart]
    assert found.ids == [[i for ids in expected for i in ids]]
    assert found.places == [np.cumsum([0, *map(len, expected[:-1])]).tolist()]
    if adds_space:
        assert found.ids == [model.encode(words, is_pretokenized=True, add_special_tokens=False).ids]


def test_pairs_of_texts_for_a_decoder(tmp_path):
    config = {
        "kind": "text_pairs",
        "path": write_rows(tmp_path, ".jsonl", [{"source": "abc", "target": "xy"}, {"source": "a", "target": "xyz"}]),
        "target_length": 4,
        "validation_fraction": 0.0,
    }
    data = open_data(config, sequence_length=6)
    rows = in_file_order(data)
    pad, end = 256, 257
    assert rows["inputs"]["tokens"].tolist() == [[97, 98, 99, end, pad, pad], [97, end, pad, pad, pad, pad]]
    assert rows["targets"].tolist() == [[120, 121, end, -100], [120, 121, 122, end]]
    assert rows["inputs"]["decoder_tokens"].tolist() == [[0, 120, 121, pad], [0, 120, 121, 122]]
    assert rows["inputs"]["decoder_segments"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert (data.decoder_length, data.units_per_row, data.vocab_size) == (4, 10, 256 + 102)


def test_a_target_that_is_cut_ends_all_the_same(tmp_path):
    rows = [{"source": "a", "target": target} for target in ("x" * 3, "x" * 4, "x" * 9)]
    config = {"kind": "text_pairs", "path": write_rows(tmp_path, ".jsonl", rows), "target_length": 4}
    data = open_data({**config, "validation_fraction": 0.0}, sequence_length=6)
    assert in_file_order(data)["targets"].tolist() == [[120, 120, 120, 257]] * 3
    assert "2 of 3 targets are longer than 4 tokens and truncated" in data.description


# id: (file name, its content, more keys, what is said)
WRONG = {
    "no column": (
        "a.csv",
        "text,tag\nx,1\n",
        {},
        r"a.csv:1 has no column 'label' \(it has: text, tag\); set data.label",
    ),
    "no label": ("a.csv", "text,label\nx,\n", {}, r"a.csv:2 column 'label' is '', not a class"),
    "a short line": ("a.csv", "text,label\nx\n", {}, r"a.csv:2 has 1 fields, the header has 2"),
    "no number": ("a.csv", "text,label\nx,abc\n", {"task": "regression"}, r"column 'label' is 'abc', not a number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_a_file_is_one_line(name, tmp_path):
    file, content, more, said = WRONG[name]
    (tmp_path / file).write_text(content)
    task = more.get("task")
    more = {key: value for key, value in more.items() if key != "task"}
    config = {"kind": "labelled_text", "path": str(tmp_path / file), "validation_fraction": 0.0, **more}
    with pytest.raises(DataError, match=said) as caught:
        open_data(config, sequence_length=16, task=task)
    assert "\n" not in str(caught.value)


def test_built_in_docstrings():
    data = open_data({"kind": "labelled_text", "builtin": "python_docstrings"}, sequence_length=128)
    assert data.reading["classes"] == ["asyncio", "email", "importlib", "logging", "tkinter", "unittest", "xml"]
    assert len(data.train) > 1000
    pairs = open_data({"kind": "text_pairs", "builtin": "python_docstrings"}, sequence_length=128)
    assert len(pairs.train) > 2500
