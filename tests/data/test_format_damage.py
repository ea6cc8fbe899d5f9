"""Damage and unusual content that a format must say, in place of leaving rows out or ending with a traceback."""

import contextlib
import gzip
import io
import json
import os
import tarfile

import pyarrow
import pytest
from format_files import png, write_array_record, write_stream, write_tar
from pyarrow import parquet

from jaxtrain.data import open_data, remote
from jaxtrain.data.formats import array_record, opened
from jaxtrain.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE_DIR", str(tmp_path / "cache"))


def passed(path, column="text", bad=None):
    files = opened.find_rows(str(path), what="data.path")
    return [row[column] for file in files for _, row in opened.pass_over_file(file, [("field", column)], bad=bad)]


def texts(folder, name, numbers):
    return write_tar(folder / name, [(f"{i}.txt", str(i).encode()) for i in numbers])


def joined_tars(folder):
    parts = [texts(folder, "a.tar", [0, 1]).read_bytes(), texts(folder, "b.tar", [2, 3]).read_bytes()]
    (folder / "c.tar").write_bytes(b"".join(parts))
    return folder / "c.tar"


def damaged_header(folder):
    path = texts(folder, "a.tar", range(6))
    content = bytearray(path.read_bytes())
    content[2 * 1024 + 150] ^= 7  # in the checksum of the third header
    path.write_bytes(content)
    return path


def linked(folder):
    (folder / "0.txt").write_text("same")
    os.link(folder / "0.txt", folder / "1.txt")
    with tarfile.open(folder / "a.tar", "w") as archive:
        for name in ("0.txt", "1.txt"):
            archive.add(folder / name, name)
    return folder / "a.tar"


TARS = {
    "two tar files one after another": (joined_tars, "c.tar is damaged at byte"),
    "a header is damaged": (damaged_header, "a.tar is damaged at byte 2048"),
    "a hard link": (linked, "a.tar has '1.txt' as a link"),
}


@pytest.mark.parametrize("name", TARS)
def test_no_member_of_a_tar_file_is_lost_silently(tmp_path, name):
    make, message = TARS[name]
    with pytest.raises(DataError, match=message):
        passed(make(tmp_path), "txt")


@pytest.mark.long
def test_a_group_may_have_any_number_of_endings(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for i in range(2**15 + 1):
            archive.addfile(tarfile.TarInfo(f"clip.{i}"), io.BytesIO())
    assert passed(tmp_path / "a.tar", "32768") == [b""]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_text_that_is_not_utf8_is_a_bad_row(tmp_path, form):
    # Arrow checks no text; other programs write what they like.
    buffers = [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pyarrow.py_buffer(b"ab\xff\xfe")]
    table = pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)})
    path = tmp_path / f"a.{form}"
    parquet.write_table(table, path) if form == "parquet" else write_stream(path, table)
    with pytest.raises(DataError, match=r"row 2 column 'text' cannot be read \(text is not UTF-8\)"):
        passed(path)
    bad = []
    assert passed(path, bad=bad.append) == ["ab"]
    assert len(bad) == 1


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_column_that_is_there_twice_is_one_line(tmp_path, form):
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"]), pyarrow.array(["y"])], names=["text", "text"])
    path = tmp_path / f"a.{form}"
    parquet.write_table(table, path) if form == "parquet" else write_stream(path, table)
    with pytest.raises(DataError, match="has column 'text' twice; rename one"):
        passed(path)


def test_a_bad_line_of_a_compressed_file_can_be_skipped(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "\xff"}\n{"text": "b"}\n'))
    bad = []
    assert passed(tmp_path / "a.jsonl.gz", bad=bad.append) == ["a", "b"]
    assert "is not UTF-8 at byte 24" in str(bad[0])


def test_mapped_files_keep_no_handle(tmp_path):
    paths = [write_stream(tmp_path / f"{i}.arrow", pyarrow.table({"text": [f"{i}"]})) for i in range(8)]
    before = len(os.listdir("/proc/self/fd"))
    reader = opened.open_rows(opened.find_rows(str(tmp_path), what="data.path"), None, label="files")
    assert len(os.listdir("/proc/self/fd")) == before
    assert [row["text"] for row in reader.rows(range(len(paths)))] == [f"{i}" for i in range(8)]


def test_lines_of_white_space_are_no_rows(tmp_path):
    lines = ['{"text": "a"}', " " * 40, "\u00a0", '  {"text": "b"}', "{" + " " * 2**8 + '"text": "c"}', ""]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    files = opened.find_rows(str(tmp_path / "a.jsonl"), what="data.path")
    reader = opened.open_rows(files, None, label="lines")
    assert [row["text"] for row in reader.rows(range(len(reader)))] == passed(tmp_path / "a.jsonl") == ["a", "b", "c"]


def test_files_of_one_format_come_before_those_of_the_next(tmp_path):
    for name in ("z.jsonl", "10.jsonl", "2.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    parquet.write_table(pyarrow.table({"text": ["b"]}), tmp_path / "b.parquet")
    found = opened.find_rows(str(tmp_path), what="data.path", one_format=False)
    assert [file.name for file in found] == ["10.jsonl", "2.jsonl", "z.jsonl", "b.parquet"]


def test_the_index_of_pandas_is_no_column_of_a_table(tmp_path):
    columns = {"a": [i * 0.5 for i in range(20)], "y": [i % 2 for i in range(20)], "__index_level_0__": list(range(20))}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    config = {"kind": "table", "path": str(tmp_path / "a.parquet")}
    data = open_data(config)
    assert (data.reading["columns"], data.reading["classes"]) == (["a"], ["0", "1"])
    named = open_data({**config, "target": "y", "columns": ["__index_level_0__", "a"]})
    assert named.reading["columns"] == ["__index_level_0__", "a"]


def test_a_number_is_the_same_class_as_its_text(tmp_path):
    labels = [0, 1, "0", "1", "other"] * 4
    lines = [json.dumps({"a": i, "y": label}) for i, label in enumerate(labels)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert open_data({"kind": "table", "path": str(tmp_path / "a.jsonl")}).reading["classes"] == ["0", "1", "other"]


@pytest.mark.parametrize("row", ['{"a": 1%s, "y": 0}', '{"a": 1, "y": 1%s}'], ids=["input", "target"])
def test_a_number_of_hundreds_of_digits_is_one_line(tmp_path, row):
    (tmp_path / "a.jsonl").write_text(row % ("0" * 400))
    with pytest.raises(DataError, match=r"a.jsonl:1 column .* not a finite number"):
        open_data({"kind": "table", "path": str(tmp_path / "a.jsonl")})


def test_images_without_a_class_are_named(tmp_path):
    names = {"info": {"features": {"label": {"names": ["ant", "bee"], "_type": "ClassLabel"}}}}
    table = pyarrow.table({"image": [png(i) for i in range(4)], "label": [0, 1, -1, 0]})
    write_stream(tmp_path / "a.arrow", table.replace_schema_metadata({"huggingface": json.dumps(names)}))
    with pytest.raises(DataError, match="row 3 column 'label' is -1, by which other libraries mark a row"):
        open_data({"kind": "images", "path": str(tmp_path / "a.arrow"), "image_size": 8})


def test_a_local_copy_holds_nothing_else(tmp_path):
    class Store:
        is_one_file = False

        def files(self):
            return [remote.RemoteFile("b/x/1.jsonl", "1.jsonl", 3, "tag")]

        @contextlib.contextmanager
        def reading(self, file):
            yield io.BytesIO(b"{}\n")

    # As a process leaves it that was ended between a copy and its note.
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "gone.jsonl").write_text("{}\n")
    for _ in range(2):
        assert remote._brought_up_to_date(Store(), tmp_path, what="data.path") == tmp_path  # pyright: ignore[reportArgumentType] a stand-in
        assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["1.jsonl"]


def test_an_address_that_is_none_is_one_line():
    with pytest.raises(DataError, match=r"data.path s3://\[ab\]/x is no address"):
        remote.local_copy("s3://[ab]/x", what="data.path", cache=None)


def test_empty_files_before_others_do_not_matter(tmp_path):
    rows = {
        "image": [png(i) for i in range(12)],
        "x": [float(i) for i in range(12)],
        "label": [i % 2 for i in range(12)],
    }
    table = pyarrow.table(rows)
    parquet.write_table(table.slice(0, 0), tmp_path / "0.parquet")
    parquet.write_table(table, tmp_path / "1.parquet")
    assert len(open_data({"kind": "images", "path": str(tmp_path), "validation_fraction": 0}).train) == 12
    settings = {"kind": "table", "columns": ["x"], "target": "label", "validation_fraction": 0}
    assert len(open_data({**settings, "path": str(tmp_path)}).train) == 12
    with pytest.raises(DataError, match=r"0.parquet has no rows; give a file with images"):
        open_data({"kind": "images", "path": str(tmp_path / "0.parquet")})


def test_half_a_character_is_one_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "left \\ud800 right"}\n' * 3)
    config = {"kind": "jsonl", "path": str(tmp_path / "a.jsonl"), "tokenizer": {"kind": "bpe", "vocab_size": 270}}
    with pytest.raises(DataError, match=r"half a character .* 'left .ud800 right'"):
        open_data(config, sequence_length=8)


def test_array_record_files_share_a_number_of_handles(tmp_path, monkeypatch):
    monkeypatch.setattr(array_record, "MOST_OPEN", 2)
    for i in range(8):
        write_array_record(tmp_path / f"{i}.array_record", [f"{i} {j}".encode() for j in range(3)])
    before = len(os.listdir("/proc/self/fd"))
    reader = opened.open_rows(opened.find_rows(str(tmp_path), what="data.path"), None, label="files")
    numbers = list(range(24))[::-1]
    assert [row["text"] for row in reader.rows(numbers)] == [f"{i // 3} {i % 3}" for i in numbers]
    assert len(os.listdir("/proc/self/fd")) <= before + 2
