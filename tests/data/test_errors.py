"""Every mistake a user can make with data is one line: what is wrong, where, what would work."""

import gzip
import lzma
import re
import sys

import numpy as np
import pytest

from jaxtrain.config.data import (
    DigitsData,
    ImageFolderData,
    JsonlData,
    TableData,
    TextData,
    TokenData,
)
from jaxtrain.data import Batches, check_tokens, open_data
from jaxtrain.errors import DataError


def text(path, **settings):
    return TextData(path=str(path), **settings)


def jsonl(path):
    return JsonlData(path=str(path))


def table(path, **settings):
    return TableData(path=str(path), **settings)


def images(path):
    return ImageFolderData(path=str(path), image_size=8)


# Begins as every file of zstd.
ZSTD = bytes.fromhex("28b52ffd0403190000 7b7d0a 8cc1b2a5")

# Files to write (name -> content), what to open, and the whole message; {dir} is the folder of the test.
CASES = {
    "missing file": (
        {},
        lambda d: text(d / "no" / "such.txt"),
        "data.path {dir}/no/such.txt does not exist; the nearest existing path is {dir}",
    ),
    "empty file": (
        {"a.txt": b""},
        lambda d: text(d / "a.txt"),
        "data.path {dir}/a.txt is empty; give a file with content",
    ),
    "folder without text": (
        {"a.md": b"x"},
        lambda d: text(d),
        "data.path {dir} holds no .txt file; give a folder with .txt files or a glob",
    ),
    "glob without a match": (
        {"sub/a.md": b"x"},
        lambda d: text(d / "sub" / "*" / "*.txt"),
        "data.path {dir}/sub/*/*.txt matches no file; the nearest existing path is {dir}/sub",
    ),
    "no source": (
        {},
        lambda d: TextData(builtin=None),
        "data.path and data.builtin are both null; set one, for example data.builtin=python_prose",
    ),
    "not UTF-8": (
        {"a.txt": b"good \xff bad"},
        lambda d: text(d / "a.txt"),
        "{dir}/a.txt is not UTF-8 at byte 5 (0xff); convert it, for example with: iconv -t UTF-8 a.txt",
    ),
    "text compressed with gzip": (
        {"a.txt": gzip.compress(b"good text")},
        lambda d: text(d / "a.txt"),
        "{dir}/a.txt is compressed with gzip, not text; decompress it first: gunzip -k a.txt",
    ),
    "JSON lines compressed with xz": (
        {"a.jsonl.xz": lzma.compress(b"{}")},
        lambda d: JsonlData(path=str(d / "a.jsonl.xz")),
        "{dir}/a.jsonl.xz is compressed with xz, not text; decompress it first: unxz -k a.jsonl.xz",
    ),
    "JSON lines damaged within zstd": (
        {"a.jsonl.zst": ZSTD},
        lambda d: JsonlData(path=str(d / "a.jsonl.zst")),
        "{dir}/a.jsonl.zst is damaged or truncated (ZSTD decompress failed: Restored data doesn't match checksum); "
        "check it with zstd -t a.jsonl.zst, and fetch it again",
    ),
    "folder of JSON lines compressed with what is not read": (
        {"sub/b.jsonl.xz": lzma.compress(b"{}")},
        lambda d: JsonlData(path=str(d)),
        "data.path {dir} holds no .jsonl file but compressed ones (b.jsonl.xz); decompress them first",
    ),
    "compressed JSON lines as text": (
        {"a.jsonl.zst": ZSTD},
        lambda d: text(d / "a.jsonl.zst"),
        "data.path {dir}/a.jsonl.zst holds JSON lines, not plain text; set data.kind=jsonl",
    ),
    "compressed table": (
        {"a.csv.xz": lzma.compress(b"x,y\n1,2\n")},
        lambda d: table(d / "a.csv.xz"),
        "{dir}/a.csv.xz is compressed with xz, not text; decompress it first: unxz -k a.csv.xz",
    ),
    "a table of another kind by its content": (
        {"a.csv": b"PAR1\x15\x04\xff\xfe"},
        lambda d: table(d / "a.csv"),
        "{dir}/a.csv is a Parquet file, not text; convert it to text first (JSON lines or CSV), for example "
        "with pandas or duckdb",
    ),
    "text shorter than a row": (
        {"a.txt": b"0123456789"},
        lambda d: text(d / "a.txt", validation_fraction=0.0),
        "{dir}/a.txt has 11 tokens, too few for one row of sequence_length 16; set data.sequence_length to at most 10",
    ),
    "text shorter than two rows": (
        {"a.txt": b"0123456789" * 3},
        lambda d: text(d / "a.txt"),
        "{dir}/a.txt has 31 tokens, too few for one training and one validation row of sequence_length 16; "
        "set data.sequence_length to at most 14 (or, to evaluate a trained run on all rows, "
        "data.validation_fraction=1)",
    ),
    "corrupt JSONL line": (
        {"a.jsonl": b'{"text": "a"}\n\n{"text": \n'},
        lambda d: jsonl(d / "a.jsonl"),
        "{dir}/a.jsonl:3 is not JSON: Expecting value at column 9; fix or remove the line",
    ),
    "JSONL line that is no object": (
        {"a.jsonl": b"[1]\n"},
        lambda d: jsonl(d / "a.jsonl"),
        "{dir}/a.jsonl:1 holds a value of type list, not an object; write one object per line",
    ),
    "field missing from a JSONL line": (
        {"a.jsonl": b'{"text": "a"}\n{"body": "b", "id": 1}\n'},
        lambda d: jsonl(d / "a.jsonl"),
        "{dir}/a.jsonl:2 has no field 'text' (it has: body, id); set data.field to one of them",
    ),
    "field that is no text": (
        {"a.jsonl": b'{"text": 3}\n'},
        lambda d: jsonl(d / "a.jsonl"),
        "{dir}/a.jsonl:1 field 'text' holds a value of type int, not text; set data.field",
    ),
    "JSONL that is not UTF-8": (
        {"a.jsonl": b'{"text": "a"}\n{"text": "\xe9"}\n'},
        lambda d: jsonl(d / "a.jsonl"),
        "{dir}/a.jsonl is not UTF-8 at byte 24 (0xe9); convert it, for example with: iconv -t UTF-8 a.jsonl",
    ),
    "JSONL with blank lines only": (
        {"a.jsonl": b"\n\n"},
        lambda d: jsonl(d / "a.jsonl"),
        "{dir}/a.jsonl holds no document; give a file with text",
    ),
    "folder that is no folder of shards": (
        {"a.bin": b"x"},
        lambda d: TokenData(path=str(d)),
        "data.path {dir} has no metadata.json; make the folder with: jaxtrain data prepare",
    ),
    "damaged metadata": (
        {"metadata.json": b'{"dtype": "uint16"}'},
        lambda d: TokenData(path=str(d)),
        "{dir}/metadata.json is not what jaxtrain data prepare writes: vocab_size: Field required; "
        "write the folder again",
    ),
    "unknown built-in table": (
        {},
        lambda d: table("builtin:iris2"),
        "data.path builtin:iris2 is unknown; known are builtin:breast_cancer, builtin:wine, builtin:diabetes",
    ),
    "table of another format": (
        {"a.xls": b"x"},
        lambda d: table(d / "a.xls"),
        "data.path {dir}/a.xls is no .csv or .npz file; convert it, or use builtin:breast_cancer",
    ),
    "ragged CSV row": (
        {"a.csv": b"x,y,z\n1,2,3\n1,2\n"},
        lambda d: table(d / "a.csv"),
        "{dir}/a.csv:3 has 2 fields, the header has 3; fix or remove the line",
    ),
    "CSV cell that is no number": (
        {"a.csv": b"x,y,z\n1,2,3\n1,red,3\n"},
        lambda d: table(d / "a.csv"),
        "{dir}/a.csv:3 column 'y' is 'red', not a number; fill it, or remove the line or the column",
    ),
    "CSV cell that is empty": (
        {"a.csv": b"x,y,z\n1,,3\n"},
        lambda d: table(d / "a.csv"),
        "{dir}/a.csv:2 column 'y' is empty; fill it, or remove the line or the column",
    ),
    "NaN in a CSV": (
        {"a.csv": b"x,y,z\nnan,1,3\n"},
        lambda d: table(d / "a.csv"),
        "{dir}/a.csv:2 column 'x' is nan; fill it, or remove the line or the column",
    ),
    "NaN as a CSV target": (
        {"a.csv": b"x,y,z\n1,1,3\n1,1,NaN\n"},
        lambda d: table(d / "a.csv"),
        "{dir}/a.csv:3 column 'z' has no value; fill it or remove the line",
    ),
    "infinity as a CSV target": (
        {"a.csv": b"x,y,z\n1,1,inf\n"},
        lambda d: table(d / "a.csv"),
        "{dir}/a.csv:2 column 'z' has no value; fill it or remove the line",
    ),
    "CSV without the target": (
        {"a.csv": b"x,y,z\n1,2,3\n"},
        lambda d: table(d / "a.csv", target="w"),
        "{dir}/a.csv has no column 'w' (it has: x, y, z); set data.target to one of them",
    ),
    "CSV without a header": (
        {"a.csv": b"1,2,3\n4,5,6\n"},
        lambda d: table(d / "a.csv"),
        "{dir}/a.csv:1 holds only numbers; the first line must name the columns",
    ),
    "CSV of classes without a header": (
        {"a.csv": b"1,2,cat\n3,4,dog\n5,6,cat\n"},
        lambda d: table(d / "a.csv"),
        "{dir}/a.csv:1 is a row (1, ..., cat), not names of columns; write names above it, such as a,b,class",
    ),
    "CSV with a header only": (
        {"a.csv": b"x,y\n"},
        lambda d: table(d / "a.csv"),
        "{dir}/a.csv has no rows; give a table with at least one",
    ),
    "CSV that is not UTF-8": (
        {"a.csv": b"x,y\n1,\xe9\n"},
        lambda d: table(d / "a.csv"),
        "{dir}/a.csv is not UTF-8 at byte 6 (0xe9); convert it, for example with: iconv -t UTF-8 a.csv",
    ),
    "one row for two parts": (
        {"a.csv": b"x,y\n1,2\n"},
        lambda d: table(d / "a.csv"),
        "{dir}/a.csv has too few rows (1) for a training and a validation part; "
        "add rows or set data.validation_fraction=0 (or 1, to evaluate a trained run on all rows)",
    ),
    "text targets asked for as numbers": (
        {"a.csv": b"x,y\n1,red\n2,blue\n"},
        lambda d: table(d / "a.csv", task="regression"),
        "{dir}/a.csv:2 column 'y' is 'red', not a number; fix or remove the row, or set task=classification and "
        "data.task=classification",
    ),
    "whole numbers that could be classes": (
        {"a.csv": b"x,age\n" + b"".join(b"%d,%d\n" % (i, i % 40) for i in range(400))},
        lambda d: table(d / "a.csv"),
        "{dir}/a.csv has 40 distinct integers as targets of 400 rows, which could be quantities or classes; "
        "set task=regression and data.task=regression, or task=classification and data.task=classification",
    ),
    "more numbers than classes asked for": (
        {"a.csv": b"x,y\n" + b"".join(b"%d,%d\n" % (i, i) for i in range(1001))},
        lambda d: table(d / "a.csv", task="classification"),
        "{dir}/a.csv has 1001 distinct targets, more than 1000 classes; set task=regression, data.task=regression",
    ),
    "image folder that is a file": (
        {"a.png": b"x"},
        lambda d: images(d / "a.png"),
        "data.path {dir}/a.png is a file; give a folder",
    ),
    "image folder without classes": (
        {"a.png": b"x"},
        lambda d: images(d),
        "{dir} holds 0 class folders; give a folder with one folder per class, at least 2",
    ),
    "folders of images that are no classes": (
        {f"{part}/{name}/a.png": b"x" for part in ("Train", "Test") for name in ("cat", "dog")},
        lambda d: images(d),
        "{dir} holds Test and Train, which are named as parts of a dataset and not as classes; name them train/ and "
        "val/, or give one of them as data.path",
    ),
    "a glob of JSON lines as text": (
        {"a.txt": b"x", "b.jsonl": b'{"text": "a"}\n'},
        lambda d: text(d / "*"),
        "data.path {dir}/b.jsonl holds JSON lines, not plain text; set data.kind=jsonl",
    ),
    "class without images": (
        {"cat/a.png": b"x", "dog/readme": b"x"},
        lambda d: images(d),
        "{dir}/dog holds no image; add files (.bmp .gif .jpeg .jpg .png .ppm .tif .tiff .webp) or remove it",
    ),
    "validation class that training lacks": (
        {"train/a/a.png": b"x", "train/b/a.png": b"x", "val/c/a.png": b"x"},
        lambda d: images(d),
        "{dir}/val/c is a class that train/ does not have; its classes are a, b",
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
    assert str(error.value) == message.replace("{dir}", str(tmp_path))
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


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 2))}, "has no array 'inputs' (it has: x); save it by that name"),
        (
            {"inputs": np.zeros((3, 2)), "targets": np.zeros(4)},
            "has inputs (3, 2) and targets (4,); they must be [rows, columns] and [rows] or [rows, columns] "
            "with as many rows",
        ),
        (
            {"inputs": np.array([[0, 1], [2, np.nan]]), "targets": np.zeros(2)},
            "array 'inputs' is nan at [1, 1]; remove or fill the row",
        ),
        (
            {"inputs": np.array([["a"], ["b"]]), "targets": np.zeros(2)},
            "array 'inputs' holds <U1, not numbers; convert it before saving",
        ),
    ],
    ids=["name", "shape", "nan", "text"],
)
def test_a_bad_npz_is_one_line(arrays, message, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError) as error:
        open_data(table(path), sequence_length=None, seed=0)
    assert str(error.value) == f"{path} {message}"


def test_a_file_that_is_no_npz_is_one_line(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"not a zip")
    with pytest.raises(DataError, match=r"a\.npz is no \.npz archive \(.*\); write it with numpy\.savez$") as error:
        open_data(table(path), sequence_length=None, seed=0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DigitsData(), "data.kind digits needs scikit-learn; run: pip install scikit-learn"),
        (table("builtin:wine"), "data.path builtin:wine needs scikit-learn; run: pip install scikit-learn"),
    ],
    ids=["digits", "table"],
)
def test_missing_scikit_learn_says_how_to_install_it(config, message, monkeypatch):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        open_data(config, sequence_length=None, seed=0)


def test_tokens_need_a_length():
    with pytest.raises(DataError, match=r"^data\.sequence_length is null and the model has no max_sequence_length"):
        open_data(TextData(), sequence_length=None, seed=0)


@pytest.mark.parametrize("ids", [[[0, 1], [2, 5]], [[0, 1], [2, -1]]], ids=["large", "negative"])
def test_check_tokens_names_the_source_and_the_position(ids):
    with pytest.raises(DataError, match=rf"^rows: token {ids[1][1]} at position 1, 1 is outside the vocabulary of 5;"):
        check_tokens(np.array(ids), 5, "rows")
    check_tokens(np.abs(np.array(ids)), 6, "rows")
