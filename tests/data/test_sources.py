"""Every source gives the rows, shapes and description it promises."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config import load_config
from jaxtrain.config.data import (
    Component,
    DigitsData,
    ImageFolderData,
    JsonlData,
    MixtureData,
    SyntheticData,
    TableData,
    TextData,
    TokenData,
    TokenizerConfig,
)
from jaxtrain.data import Batches, check_tokens, load_tokenizer, open_data, prepare_tokens
from jaxtrain.data.configured import open_run_data
from jaxtrain.data.stream import BatchStream
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.run.assemble import assemble
from jaxtrain.run.spec import RunSpec

BPE = TokenizerConfig(kind="bpe", vocab_size=300)


def write_text(folder):
    (folder / "b.txt").write_text("second document, with more words in it\n" * 40)
    (folder / "sub").mkdir()
    (folder / "sub" / "a.txt").write_text("third: naïve 東京\n" * 40)
    (folder / "a.txt").write_text("first document\n" * 60)
    return folder


def write_jsonl(folder):
    path = folder / "a.jsonl"
    lines = [json.dumps({"text": f"document {i} " * 20, "id": i}) for i in range(20)]
    path.write_text("\n".join([*lines[:10], "", *lines[10:]]) + "\n")
    return path


def write_images(folder):
    from PIL import Image

    random = np.random.default_rng(0)
    for name, shape in {"cat": (20, 30, 3), "dog": (40, 25, 3)}.items():
        (folder / name).mkdir(parents=True)
        for i in range(6):
            Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)).save(folder / name / f"{i}.png")
    return folder


def write_csv(folder, targets):
    path = folder / "a.csv"
    path.write_text("x,y,z\n" + "".join(f"{i},{i * i / 7},{target}\n" for i, target in enumerate(targets)))
    return path


def shards(folder):
    prepare_tokens(TextData(path=str(write_text(folder))), folder / "shards", tokens_per_shard=500)
    return TokenData(path=str(folder / "shards"))


def mixture(folder):
    return MixtureData(
        components=(
            Component(source=shards(folder), weight=3.0),
            Component(source=JsonlData(path=str(write_jsonl(folder)))),
        )
    )


SOURCES = {
    "python_prose": lambda folder: TextData(),
    "text folder": lambda folder: TextData(path=str(write_text(folder)), tokenizer=BPE),
    "jsonl": lambda folder: JsonlData(path=str(write_jsonl(folder)), tokenizer=BPE),
    "tokens": shards,
    "digits": lambda folder: DigitsData(),
    "image folder": lambda folder: ImageFolderData(
        path=str(write_images(folder)), image_size=16, validation_fraction=0.25
    ),
    "table classes": lambda folder: TableData(path=str(write_csv(folder, list("abcab" * 5)))),
    "table numbers": lambda folder: TableData(path=str(write_csv(folder, np.arange(25) / 4))),
    "synthetic tokens": lambda folder: SyntheticData(num_rows=40),
    "mixture": mixture,
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_gives_what_it_promises(name, tmp_path):
    config = SOURCES[name](tmp_path)
    data = open_data(config, sequence_length=16, seed=0)
    again = open_data(config, sequence_length=16, seed=1)
    assert json.loads(json.dumps(data.fingerprint)) == data.fingerprint == again.fingerprint
    assert data.description
    assert all("\n" not in line for line in data.description)
    assert data.validation is not None
    for rows in (data.train, data.validation):
        row = rows[len(rows) - 1]
        assert row["inputs"].shape == data.input_shape
        if data.unit == "tokens":
            assert (data.input_shape, data.units_per_row) == ((16,), 16)
            assert row["inputs"].dtype == row["targets"].dtype == np.int32
            np.testing.assert_array_equal(row["inputs"][1:], row["targets"][:-1])
            check_tokens(row["targets"], data.vocab_size, name)
        else:
            assert (data.unit, data.units_per_row) == ("examples", 1)
            assert row["inputs"].dtype == np.float32
            assert row["targets"].dtype == (np.float32 if row["targets"].ndim else np.int32)
            assert row["targets"].shape in {(), (data.num_outputs,)}
        assert Batches(rows, 4, seed=0, shuffle=True).spec()["inputs"].shape == (4, *data.input_shape)


@pytest.mark.parametrize("name", ["text folder", "tokens", "image folder", "table classes"])
def test_the_fingerprint_does_not_depend_on_the_place(name, tmp_path):
    prints = []
    for place in ("here", "elsewhere/deep"):
        (tmp_path / place).mkdir(parents=True)
        prints.append(open_data(SOURCES[name](tmp_path / place), sequence_length=16, seed=0).fingerprint)
    assert prints[0] == prints[1]


def test_the_fingerprint_depends_on_content_split_and_length(tmp_path):
    path = write_text(tmp_path) / "a.txt"
    base = TextData(path=str(path))
    changed = tmp_path / "changed" / "a.txt"
    changed.parent.mkdir()
    changed.write_text(path.read_text().replace("first", "FIRST"))
    prints = [
        open_data(config, sequence_length=length, seed=0).fingerprint
        for config, length in [
            (base, 16),
            (base, 17),
            (base.model_copy(update={"validation_fraction": 0.2}), 16),
            (base.model_copy(update={"tokenizer": BPE}), 16),
            (TextData(path=str(changed)), 16),
        ]
    ]
    assert len({json.dumps(p) for p in prints}) == len(prints)


def test_the_validation_part_is_the_end_and_apart(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(32, 127)) * 10)
    data = open_data(TextData(path=str(path), validation_fraction=0.1), sequence_length=10, seed=0)
    # 951 tokens with the newline after the document, of which round(95.1) are held out.
    assert (len(data.train), len(data.validation)) == (85, 9)
    whole = path.read_bytes() + b"\n"
    assert data.validation[0]["inputs"].tolist() == list(whole[856:866])
    assert data.train[84]["targets"].tolist() == list(whole[841:851])


@pytest.mark.parametrize(("kind", "tokens_per_shard"), [("byte", 100), ("bpe", 10**6)])
def test_prepared_shards_give_the_rows_of_the_text(kind, tokens_per_shard, tmp_path):
    config = TextData(path=str(write_text(tmp_path)), tokenizer=TokenizerConfig(kind=kind, vocab_size=300))
    summary = prepare_tokens(config, tmp_path / "shards", tokens_per_shard=tokens_per_shard)
    direct = open_data(config, sequence_length=16, seed=0)
    mapped = open_data(TokenData(path=summary["output"]), sequence_length=16, seed=0)
    assert summary["num_tokens"] == sum(shard["num_tokens"] for shard in summary["shards"])
    assert all(shard["num_tokens"] <= tokens_per_shard for shard in summary["shards"])
    assert summary["num_documents"] == 3
    assert (mapped.vocab_size, len(mapped.train)) == (direct.vocab_size, len(direct.train))
    for part in ("train", "validation"):
        for ours, theirs in zip(getattr(mapped, part), getattr(direct, part), strict=True):
            np.testing.assert_array_equal(ours["inputs"], theirs["inputs"])
            np.testing.assert_array_equal(ours["targets"], theirs["targets"])
    assert load_tokenizer(tmp_path / "shards" / "tokenizer.json").vocab_size == mapped.tokenizer.vocab_size


def test_a_preparation_that_ends_early_leaves_nothing(tmp_path):
    def stop(documents, tokens):
        assert (documents, tokens > 0) == (3, True)
        raise KeyboardInterrupt

    config = TextData(path=str(write_text(tmp_path)), tokenizer=TokenizerConfig(kind="byte"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        prepare_tokens(config, tmp_path / "shards", progress=stop)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("targets", "task", "outputs", "words"),
    [
        (["no", "yes"] * 10, None, 2, "classification into 2 classes (no, yes)"),
        ([7, 3, 5, 3] * 5, None, 3, "classification into 3 classes (3, 5, 7)"),
        ([1.5, 2, 3, 4] * 5, None, 1, "regression of 1 column"),
        (range(1001), None, 1, "regression of 1 column"),
        ([i % 40 for i in range(400)], "classification", 40, "classification into 40 classes"),
    ],
    ids=["text", "whole", "fractions", "many whole", "told many classes"],
)
def test_the_target_decides_the_task_of_a_table(targets, task, outputs, words, tmp_path):
    data = open_data(TableData(path=str(write_csv(tmp_path, targets)), task=task), sequence_length=None, seed=0)
    assert data.num_outputs == outputs
    assert words in data.description[0]


def test_the_task_of_the_run_decides_what_whole_numbers_are(tmp_path):
    words = {"data.path": str(write_csv(tmp_path, [7, 3, 5, 3] * 100))}
    spec = RunSpec(load_config("tabular_mlp", keywords={**words, "task": "regression"}), Path("runs/unused"))
    run = assemble(spec, open_run_data(spec.config))
    assert (run.data.num_outputs, run.batches.spec()["targets"].dtype) == (1, np.float32)
    spec = RunSpec(load_config("tabular_mlp", keywords={**words, "data.task": "regression"}), Path("runs/unused"))
    with pytest.raises(ConfigError, match="targets of the data are numbers; set task=regression"):
        assemble(spec, open_run_data(spec.config))


def test_augmentation_is_pure_in_the_index_and_off_in_validation(tmp_path):
    config = ImageFolderData(path=str(write_images(tmp_path)), image_size=16, validation_fraction=0.25)
    first, again, other = (open_data(config, sequence_length=None, seed=seed) for seed in (0, 0, 1))
    size = len(first.train)
    np.testing.assert_array_equal(first.train[1]["inputs"], again.train[1]["inputs"])
    assert not np.array_equal(first.train[1]["inputs"], first.train[1 + size]["inputs"])
    assert not np.array_equal(first.train[1]["inputs"], other.train[1]["inputs"])
    np.testing.assert_array_equal(first.validation[0]["inputs"], other.validation[0]["inputs"])
    plain = open_data(config.model_copy(update={"augment": False}), sequence_length=None, seed=0)
    np.testing.assert_array_equal(plain.train[1]["inputs"], plain.train[1 + size]["inputs"])


def test_train_and_val_folders_are_the_splits(tmp_path):
    write_images(tmp_path / "train")
    write_images(tmp_path / "val")
    (tmp_path / "val" / "cat" / "0.png").unlink()
    data = open_data(ImageFolderData(path=str(tmp_path), image_size=8), sequence_length=None, seed=0)
    assert (len(data.train), len(data.validation), data.num_outputs) == (12, 11, 2)


def test_other_images_keep_the_class_numbers(tmp_path):
    config = ImageFolderData(path=str(write_images(tmp_path)), image_size=8, validation_fraction=0.25)
    reading = {"kind": "image_folder", "classes": ["bird", "cat", "dog"]}
    data = open_data(config, reading=reading)
    assert {int(data.train[i]["targets"]) for i in range(len(data.train))} == {1, 2}
    assert data.num_outputs == 3
    with pytest.raises(DataError, match="dog is a class that training does not have"):
        open_data(config, reading={**reading, "classes": ["bird", "cat"]})


def test_a_label_that_marks_no_class_is_no_class(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("text,label\n" + "one,0\ntwo,1\nthree,-1\n" * 4)
    config = {"kind": "labelled_text", "path": str(path), "tokenizer": {"kind": "byte"}, "sequence_length": 8}
    with pytest.raises(DataError, match="is '-1', not a class"):
        open_data(config)


def test_an_iterator_is_read_by_one_call():
    batches = ({"inputs": np.ones((2, 3), np.float32)} for _ in range(4))
    BatchStream(batches)
    with pytest.raises(DataError, match="an earlier call has read from this iterator"):
        BatchStream(batches)
