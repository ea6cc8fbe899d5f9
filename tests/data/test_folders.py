"""Folders: links, endings, compressed files, what is left out, and what is said of damaged or changed files."""

import bz2
import gzip
import json
import lzma
import os
import re

import numpy as np
import pytest
from format_files import png, write_tar
from PIL import Image

from jaxtrain.data import open_data
from jaxtrain.data.sources.images import centered_images
from jaxtrain.errors import DataError

TEXTS = [{"text": f"document {i}, which is longer than a row"} for i in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in TEXTS).encode()
TABLE = b"x,y\n" + b"".join(b"%d,%s\n" % (i, b"ab"[i % 2 : i % 2 + 1]) for i in range(20))


def documents(path, kind="documents"):
    config = {"kind": kind, "path": str(path), "validation_fraction": 0.0}
    return open_data(config, sequence_length=8).description


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.jsonl").write_bytes(LINES)
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(LINES)
    links = {"there": "../elsewhere", "deep/up": ".."}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    for path in (folder, folder / "**" / "*.jsonl"):
        assert ": 10 documents" in documents(path)[0]
    for name, target in {"self": ".", "deep/out": "../.."}.items():
        (folder / name).symlink_to(target)
    assert ": 10 documents" in documents(folder)[0]
    (folder / "c.jsonl").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"c\.jsonl does not exist"):
        documents(folder)


FILES = {"a.jsonl": LINES, "B.JSONL.GZ": gzip.compress(LINES), "c.jsonl.bz2": bz2.compress(LINES)}
ARRAY = json.dumps(TEXTS, indent=1).encode()
TEXT = b"some plain text " * 9
# id: (kind, the files of a folder, the documents that are read, the line about the others)
FOLDERS = {
    "packed lines": ("documents", {**FILES, "d.ndjson.xz": lzma.compress(LINES)}, 20, None),
    "lines alone": (
        "jsonl",
        {"a.JSON": LINES, "b.json.xz": lzma.compress(LINES), "c.md": b"x"},
        10,
        r"1 of 3 .*\(c.md\)",
    ),
    "an array": ("documents", {"a.json": ARRAY}, 5, None),
    "a description": (
        "documents",
        {"a.jsonl": LINES, "info.json": b"{}"},
        5,
        r"1 of 2 files are left out \(info.json\)",
    ),
    "text": ("text", {"A.TXT": TEXT, "b.txt.bz2": bz2.compress(TEXT), "c.rst": TEXT}, 2, r"1 of 3 .*\(c.rst\)"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_says_what_is_left_out(name, tmp_path):
    kind, files, count, left_out = FOLDERS[name]
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    first, *others = documents(tmp_path, kind)
    assert f": {count} documents" in first
    lines = [line for line in others if "left out" in line]
    assert len(lines) == (left_out is not None)
    if left_out is not None:
        assert re.search(left_out, lines[0])


def test_tables_of_any_case_and_compression(tmp_path):
    (tmp_path / "a.CSV").write_bytes(TABLE)
    (tmp_path / "b.csv.xz").write_bytes(lzma.compress(TABLE))
    assert len(open_data({"kind": "table", "path": str(tmp_path), "validation_fraction": 0.0}).train) == 40


def image_folder(root):
    for name, suffixes in {"cat": ("jpg", "jfif", "PGM"), "dog": ("tga", "jp2", "webp")}.items():
        (root / name).mkdir(parents=True)
        for suffix in suffixes:
            Image.new("L", (16, 16), 90).save(root / name / f"a.{suffix}")
    return root


def test_images_are_what_pillow_reads(tmp_path):
    root = image_folder(tmp_path / "im")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.png").write_bytes(png(1))
    (root / "dog" / "more").symlink_to("../../more")
    (root / "cat" / "film.mpg").write_bytes(b"x")
    (root / "top.png").write_bytes(png(0))
    config = {"kind": "image_folder", "path": str(root), "image_size": 8, "validation_fraction": 0.0}
    data = open_data(config)
    targets = [int(row["targets"]) for row in data.train]
    assert sorted(targets) == [0] * 3 + [1] * 4
    assert data.description[-1].endswith("2 of 9 files are left out (cat/film.mpg, top.png)")
    with pytest.raises(
        DataError, match=r"no \.jsonl .* file \(.* holds cat, dog, top.png\); .* data.kind=image_folder"
    ):
        open_data({**config, "kind": "images"})
    (root / "cat" / "gone.png").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"gone\.png cannot be read \(No such file"):
        open_data(config)


RAMP = np.tile(np.linspace(0.1, 0.9, 32), (32, 1))


@pytest.mark.parametrize(
    ("suffix", "dtype"), [("pgm", np.uint16), ("tif", np.uint16), ("tif", np.float32), ("tif", np.int32)]
)
def test_deep_greys_are_kept_or_refused(suffix, dtype, tmp_path):
    path = tmp_path / f"a.{suffix}"
    Image.fromarray((RAMP * (65535 if dtype != np.float32 else 1)).astype(dtype)).save(path)
    Image.fromarray((RAMP * 255).astype(np.uint8)).save(tmp_path / "b.png")
    rows = centered_images([path, tmp_path / "b.png"], image_size=8)
    if dtype == np.uint16:
        np.testing.assert_allclose(rows[0]["inputs"], rows[1]["inputs"], atol=0.03)  # a step of 8 bits is 0.018
        return
    with pytest.raises(DataError, match="do not say which value is white: convert it to 8 or 16 bits"):
        rows[0]


def image_tar(path, color):
    members = []
    for number in range(12):
        members.append((f"{number}.png", png(color if number == 6 else number, size=64)))
        members.append((f"{number}.cls", str([10, 9, 2][number % 3]).encode()))
    return write_tar(path, members)


def test_numbers_as_classes_are_in_their_order_and_changed_pixels_are_other_data(tmp_path):
    config = {"kind": "images", "path": str(tmp_path / "a.tar"), "image_size": 8, "validation_fraction": 0.0}
    config["augment"] = False
    image_tar(tmp_path / "a.tar", color=6)
    before = open_data(config)
    assert before.reading["classes"] == ["2", "9", "10"]
    (tmp_path / "0.png").write_bytes(png(0, size=64))
    first = centered_images([tmp_path / "0.png"], image_size=8)[0]["inputs"]
    assert [int(row["targets"]) for row in before.train if np.array_equal(row["inputs"], first)] == [2]
    assert open_data(config).fingerprint == before.fingerprint
    size = os.path.getsize(tmp_path / "a.tar")
    image_tar(tmp_path / "a.tar", color=60)
    assert os.path.getsize(tmp_path / "a.tar") == size
    assert open_data(config).fingerprint != before.fingerprint


def test_a_key_twice_in_a_tar_is_one_line(tmp_path):
    rows = [("x/1.txt", b"one"), ("x/1.txt", b"two"), ("x/2.txt", b"three")]
    path = write_tar(tmp_path / "a.tar", rows)
    with pytest.raises(DataError, match=r"a\.tar holds two rows with the key 'x/1', side by side"):
        open_data({"kind": "documents", "path": str(path), "field": "txt"}, sequence_length=8)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_one_line(form, tmp_path):
    import pyarrow
    from pyarrow import ipc, parquet

    table = pyarrow.Table.from_arrays([pyarrow.array(list("abab"))] * 3, names=["text", "note", "text"])
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        parquet.write_table(table, path)
    else:
        with ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DataError, match=rf"a\.{form} names column 'text' twice; rename one"):
        documents(path)


# id: (name, content, the line)
DAMAGED = {
    "half a character": ("a.jsonl", LINES + b'{"text": "cut \\udc00"}\n', r"a\.jsonl:6 is not JSON \(.*surrogates"),
    "half a character in an array": ("a.json", b'[{"text": "\\ud83d x"}]', r"a\.json cannot be read \(.*surrogates"),
    "an array of no objects": ("a.json", b'[{"text": "a"}, 3]', r"a\.json row 2 is 3, not an object"),
    "cut xz": ("a.jsonl.xz", lzma.compress(LINES)[:-40], r"a\.jsonl\.xz cannot be read \("),
    "no xz": ("a.jsonl.xz", LINES, r"a\.jsonl\.xz cannot be read \(Input format not supported"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_one_line(name, tmp_path):
    file, content, message = DAMAGED[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        documents(tmp_path / file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_cut_npz_is_one_line(share, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, inputs=np.ones((40, 3)), targets=np.arange(40) % 2)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(DataError, match=r"a\.npz cannot be read \("):
        open_data({"kind": "table", "path": str(path)})
