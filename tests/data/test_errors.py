"""Every mistake a user can make with data is one line: what is wrong, where, what would work."""

import gzip
import lzma
import re
import sys

import numpy as np
import pytest

from jaxtrain.config.data import (
    Component,
    DigitsData,
    ImageFolderData,
    JsonlData,
    MixtureData,
    TableData,
    TextData,
    TokenData,
    TokenizerConfig,
)
from jaxtrain.data import Batches, check_tokens, open_data, prepare_tokens
from jaxtrain.errors import DataError


def text(path, **settings):
    return TextData(path=str(path), **settings)


def jsonl(path):
    return JsonlData(path=str(path))


def table(path, **settings):
    return TableData(path=str(path), **settings)


def images(path):
    return ImageFolderData(path=str(path), image_size=8)


# Files to write (name -> content), what to open, and what is wrong; {dir} is the folder of the test.
CASES = {
    "missing file": ({}, lambda d: text(d / "no" / "such.txt"), "no/such.txt does not exist"),
    "empty file": ({"a.txt": b""}, lambda d: text(d / "a.txt"), "a.txt is empty"),
    "folder without text": ({"a.md": b"x"}, lambda d: text(d), "data.path {dir} holds no .txt file"),
    "glob without a match": (
        {"sub/a.md": b"x"},
        lambda d: text(d / "sub" / "*" / "*.txt"),
        "sub/*/*.txt matches no file",
    ),
    "not UTF-8": ({"a.txt": b"good \xff bad"}, lambda d: text(d / "a.txt"), "a.txt is not UTF-8 at byte 5 (0xff)"),
    "text compressed with gzip": (
        {"a.txt": gzip.compress(b"good text")},
        lambda d: text(d / "a.txt"),
        "a.txt is compressed with gzip, not text",
    ),
    "folder of JSON lines compressed with what is not read": (
        {"sub/b.jsonl.xz": lzma.compress(b"{}")},
        lambda d: JsonlData(path=str(d)),
        "data.path {dir} holds no .jsonl file but compressed ones (b.jsonl.xz)",
    ),
    "compressed JSON lines as text": (
        {"a.jsonl.zst": b"x"},
        lambda d: text(d / "a.jsonl.zst"),
        "a.jsonl.zst holds JSON lines, not plain text",
    ),
    "text shorter than a row": (
        {"a.txt": b"0123456789"},
        lambda d: text(d / "a.txt", validation_fraction=0.0),
        "a.txt has 11 tokens, too few for one row of sequence_length 16",
    ),
    "text shorter than two rows": (
        {"a.txt": b"0123456789" * 3},
        lambda d: text(d / "a.txt"),
        "a.txt has 31 tokens, too few for one training and one validation row of sequence_length 16",
    ),
    "corrupt JSONL line": (
        {"a.jsonl": b'{"text": "a"}\n\n{"text": \n'},
        lambda d: jsonl(d / "a.jsonl"),
        "a.jsonl:3 is not JSON: Expecting value at column 9",
    ),
    "field missing from a JSONL line": (
        {"a.jsonl": b'{"text": "a"}\n{"body": "b", "id": 1}\n'},
        lambda d: jsonl(d / "a.jsonl"),
        "a.jsonl:2 has no field 'text' (it has: body, id)",
    ),
    "field that is no text": (
        {"a.jsonl": b'{"text": 3}\n'},
        lambda d: jsonl(d / "a.jsonl"),
        "a.jsonl:1 field 'text' holds a value of type int, not text",
    ),
    "folder that is no folder of shards": (
        {"a.bin": b"x"},
        lambda d: TokenData(path=str(d)),
        "data.path {dir} has no metadata.json",
    ),
    "table of another format": ({"a.xls": b"x"}, lambda d: table(d / "a.xls"), "a.xls is no .csv or .npz file"),
    "ragged CSV row": (
        {"a.csv": b"x,y,z\n1,2,3\n1,2\n"},
        lambda d: table(d / "a.csv"),
        "a.csv:3 has 2 fields, the header has 3",
    ),
    "CSV cell that is no number": (
        {"a.csv": b"x,y,z\n1,2,3\n1,red,3\n"},
        lambda d: table(d / "a.csv"),
        "a.csv:3 column 'y' is 'red', not a number",
    ),
    "CSV cell that is empty": (
        {"a.csv": b"x,y,z\n1,,3\n"},
        lambda d: table(d / "a.csv"),
        "a.csv:2 column 'y' is empty",
    ),
    "NaN as a CSV target": (
        {"a.csv": b"x,y,z\n1,1,3\n1,1,NaN\n"},
        lambda d: table(d / "a.csv"),
        "a.csv:3 column 'z' has no value",
    ),
    "CSV without the target": (
        {"a.csv": b"x,y,z\n1,2,3\n"},
        lambda d: table(d / "a.csv", target="w"),
        "a.csv has no column 'w' (it has: x, y, z)",
    ),
    "CSV without a header": ({"a.csv": b"1,2,3\n4,5,6\n"}, lambda d: table(d / "a.csv"), "a.csv:1 holds only numbers"),
    "one row for two parts": (
        {"a.csv": b"x,y\n1,2\n"},
        lambda d: table(d / "a.csv"),
        "a.csv has too few rows (1) for a training and a validation part",
    ),
    "whole numbers that could be classes": (
        {"a.csv": b"x,age\n" + b"".join(b"%d,%d\n" % (i, i % 40) for i in range(400))},
        lambda d: table(d / "a.csv"),
        "a.csv has 40 distinct integers as targets of 400 rows, which could be quantities or classes",
    ),
    "image folder without classes": ({"a.png": b"x"}, lambda d: images(d), "{dir} holds 0 class folders"),
    "folders of images that are no classes": (
        {f"{part}/{name}/a.png": b"x" for part in ("Train", "Test") for name in ("cat", "dog")},
        lambda d: images(d),
        "{dir} holds Test and Train, which are named as parts of a dataset and not as classes",
    ),
    "class without images": ({"cat/a.png": b"x", "dog/readme": b"x"}, lambda d: images(d), "dog holds no image"),
    "validation class that training lacks": (
        {"train/a/a.png": b"x", "train/b/a.png": b"x", "val/c/a.png": b"x"},
        lambda d: images(d),
        "val/c is a class that train/ does not have",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_one_line(case, tmp_path):
    files, config, message = CASES[case]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        open_data(config(tmp_path), sequence_length=16, seed=0)
    assert message.replace("{dir}", str(tmp_path)) in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 3


def test_an_image_that_cannot_be_decoded_is_named_when_read(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"{i}.png").write_bytes(b"no image")
    data = open_data(images(tmp_path), sequence_length=None, seed=0)
    pattern = r"^image .*/(cat|dog)/\d\.png cannot be decoded \(cannot identify image file.*\); repair or remove it$"
    for rows in (data.train, data.validation):
        with pytest.raises(DataError, match=pattern) as error:
            Batches(rows, 2, seed=0, shuffle=True)
        assert "\n" not in str(error.value)


def test_a_bad_npz_is_one_line(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, inputs=np.array([[0, 1], [2, np.nan]]), targets=np.zeros(2))
    with pytest.raises(DataError, match=r"a\.npz array 'inputs' is nan at \[1, 1\]; remove or fill the row$"):
        open_data(table(path), sequence_length=None, seed=0)


def test_missing_scikit_learn_says_how_to_install_it(monkeypatch):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=r"^data.kind digits needs scikit-learn; run: pip install scikit-learn$"):
        open_data(DigitsData(), sequence_length=None, seed=0)


def test_tokens_need_a_length():
    with pytest.raises(DataError, match=r"^data\.sequence_length is null and the model has no max_sequence_length"):
        open_data(TextData(), sequence_length=None, seed=0)


@pytest.mark.parametrize("ids", [[[0, 1], [2, 5]], [[0, 1], [2, -1]]], ids=["large", "negative"])
def test_check_tokens_names_the_source_and_the_position(ids):
    with pytest.raises(DataError, match=rf"^rows: token {ids[1][1]} at position 1, 1 is outside the vocabulary of 5;"):
        check_tokens(np.array(ids), 5, "rows")
    check_tokens(np.abs(np.array(ids)), 6, "rows")


def prepared(tmp_path, **settings):
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij" * 30)
    output = tmp_path / "shards"
    prepare_tokens(text(path, **settings), output, tokens_per_shard=100)
    return output


def open_shards(folder):
    return open_data(TokenData(path=str(folder)), sequence_length=16, seed=0)


def test_a_token_out_of_range_names_file_and_position(tmp_path):
    folder = prepared(tmp_path)
    shard = folder / "shard-00001.bin"
    tokens = np.fromfile(shard, "<u2")
    tokens[37] = 300
    tokens.tofile(shard)
    message = (
        f"{shard}: token 300 at position 37 is outside the vocabulary of 256; "
        "use the tokenizer the data was made with, or a model with a larger vocab_size"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        open_shards(folder)


def test_a_truncated_shard_names_both_sizes(tmp_path):
    folder = prepared(tmp_path)
    shard = folder / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    message = (
        f"token shard {shard} has 199 bytes, metadata.json says 200; "
        "copy it again, or write the folder again with: jaxtrain data prepare"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        open_shards(folder)


def test_preparing_over_a_folder_is_refused(tmp_path):
    folder = prepared(tmp_path)
    with pytest.raises(DataError, match=f"^output {re.escape(str(folder))} exists; give another folder, or remove it$"):
        prepare_tokens(text(tmp_path / "a.txt"), folder, tokens_per_shard=100)


def test_shards_of_another_tokenizer_do_not_mix(tmp_path):
    folder = prepared(tmp_path, tokenizer=TokenizerConfig(kind="bpe", vocab_size=260))
    config = MixtureData(
        components=(Component(source=TokenData(path=str(folder))), Component(source=text(tmp_path / "a.txt")))
    )
    message = (
        f"{folder} was made with another tokenizer than the rest of the mixture; "
        f"set data.tokenizer.kind=file data.tokenizer.path={folder}/tokenizer.json, or prepare it again"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        open_data(config, sequence_length=16, seed=0)
