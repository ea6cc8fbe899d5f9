"""Formats and kinds are independent: the same rows whatever file they are in, and each mistake one line."""

import http.server
import json
import threading

import jax
import numpy as np
import pyarrow
import pytest
from format_files import png, write_rows, write_stream, write_tar
from pyarrow import parquet

from jaxtrain.data import Batches, open_data
from jaxtrain.errors import DataError

ROWS = [
    {
        "text": f"text number {i} " * (i % 5 + 1),
        "label": i % 3,
        "first": i * 0.5,
        "second": float(-i),
        "note": "no number",
    }
    for i in range(40)
]
CHATS = [{"prompt": f"question {i}?", "completion": f"answer {i}."} for i in range(30)]
PAIRS = [{"prompt": f"question {i}?", "chosen": f"right {i}.", "rejected": f"wrong {i}!"} for i in range(30)]
FORMATS = ("lines", "lines.gz", "lines.zst", "parquet", "arrow", "arrow_file", "saved", "array_record", "tar")
# id: (rows, settings of the data group, arguments of open_data)
KINDS = {
    "texts in a stream": (ROWS, {"kind": "documents", "field": "text"}, {"sequence_length": 16}),
    "labelled texts": (ROWS, {"kind": "labelled_text", "tokenizer": {"kind": "byte"}}, {"sequence_length": 24}),
    "a table": (ROWS, {"kind": "table", "target": "label", "columns": ["second", "first"]}, {}),
    "chats": (CHATS, {"kind": "chat", "template": "plain"}, {"sequence_length": 64}),
    "pairs of answers": (PAIRS, {"kind": "chat", "template": "plain"}, {"sequence_length": 64, "task": "dpo"}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE_DIR", str(tmp_path / "cache"))


def all_rows(data):
    parts = [part for part in (data.train, data.validation) if part is not None]
    return [part.gather(np.arange(len(part))) for part in parts]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_rows(tmp_path, kind):
    rows, settings, arguments = KINDS[kind]
    expected = None
    for form in FORMATS:
        folder = tmp_path / form
        folder.mkdir()
        path = write_rows(folder, form, rows)
        found = all_rows(open_data({**settings, "path": str(path)}, **arguments))
        expected = expected or found
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def image_file(folder, form):
    rows = [{"image": png(i), "label": i % 3} for i in range(24)]
    if form == "tar":
        members = []
        for i, row in enumerate(rows):
            members += [(f"x/{i:03d}.png", row["image"]), (f"x/{i:03d}.cls", str(row["label"]).encode())]
        return write_tar(folder / "a.tar", members)
    if form == "datasets":
        # As datasets keeps images (bytes beside a path) and classes (numbers, whose names the schema has).
        names = {"info": {"features": {"label": {"names": ["ant", "bee", "cat"], "_type": "ClassLabel"}}}}
        rows = [{"image": {"bytes": row["image"], "path": None}, "label": row["label"]} for row in rows]
        table = pyarrow.Table.from_pylist(rows)
        return write_stream(folder / "a.arrow", table.replace_schema_metadata({"huggingface": json.dumps(names)}))
    return write_rows(folder, form, rows)


def test_images_are_the_same_in_every_format(tmp_path):
    expected = None
    for form in ("parquet", "arrow", "tar", "datasets"):
        folder = tmp_path / form
        folder.mkdir()
        path = image_file(folder, form)
        data = open_data({"kind": "images", "path": str(path), "image_size": 8}, seed=3)
        assert data.reading is not None
        assert data.reading["classes"] == (["ant", "bee", "cat"] if form == "datasets" else ["0", "1", "2"])
        batches = Batches(data.train, 6, seed=0, shuffle=True, workers=2)
        found = jax.device_get(
            batches.load(5, dict.fromkeys(batches.spec(), jax.sharding.SingleDeviceSharding(jax.devices()[0])))
        )
        expected = expected or found
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def cut(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def documents(path, **settings):
    return lambda: open_data({"kind": "documents", "path": str(path), **settings}, sequence_length=8)


def broken_file(folder, form, share):
    path = write_rows(folder, form, ROWS)
    cut(path, share)
    return path


def damaged_header(folder):
    path = write_tar(folder / "a.tar", [(f"{i}.txt", str(i).encode()) for i in range(6)])
    content = bytearray(path.read_bytes())
    content[2 * 1024 + 150] ^= 7  # in the checksum of the third header
    path.write_bytes(content)
    return path


def not_utf8(folder):
    # Arrow checks no text; other programs write what they like.
    buffers = [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pyarrow.py_buffer(b"ab\xff\xfe")]
    table = pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)})
    parquet.write_table(table, folder / "a.parquet")
    return folder / "a.parquet"


# id: (makes the data in a folder, and returns what opens it; the message)
WRONG = {
    "Parquet cut off": (lambda d: documents(broken_file(d, "parquet", 0.7)), r"a.parquet cannot be read \("),
    "tar cut off": (lambda d: documents(broken_file(d, "tar", 0.5)), r"a.tar cannot be read \(.* cut off at byte"),
    "gzip cut off": (lambda d: documents(broken_file(d, "lines.gz", 0.7)), r"a.jsonl.gz cannot be read \("),
    "no such column": (
        lambda d: documents(write_rows(d, "parquet", ROWS), field="txet"),
        r"a.parquet has no column 'txet' \(it has: text, label, first, second, note\); set data.field to one of them",
    ),
    "a column that is no text": (
        lambda d: documents(write_rows(d, "arrow", ROWS), field="first"),
        "a.arrow row 1 column 'first' is 0.0, not text",
    ),
    "images in lines": (
        lambda d: lambda: open_data({"kind": "images", "path": str(write_rows(d, "lines", [{"jpg": "", "cls": 1}]))}),
        r"a.jsonl has no random access to rows; give files of parquet, arrow, tar",
    ),
    "no UTF-8": (lambda d: documents(not_utf8(d)), r"row 2 column 'text' cannot be read \(text is not UTF-8"),
    "a damaged header": (
        lambda d: documents(damaged_header(d), field="txt"),
        r"a\.tar cannot be read \(.*damaged or cut off at byte 2048",
    ),
    "several splits": (
        lambda d: ((d / "dataset_dict.json").write_text('{"splits": ["train", "test"]}'), documents(d))[1],
        r"holds splits \(train, test\); give one of them: .*/train",
    ),
    "no column of images": (
        lambda d: lambda: open_data({"kind": "images", "path": str(write_rows(d, "parquet", ROWS))}),
        r"a.parquet row 1 has no column 'image' \(it has: text, .*\); set data.image to one of them",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line(name, tmp_path):
    make, message = WRONG[name]
    with pytest.raises(DataError, match=message) as error:
        make(tmp_path)()
    assert "\n" not in str(error.value)


def test_a_file_behind_an_address_is_copied_once(tmp_path, capsys):
    (tmp_path / "served").mkdir()
    path = write_rows(tmp_path / "served", "parquet", ROWS)
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(path.parent))

        def log_request(self, *arguments):
            asked.append(self.command)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}/a.parquet"
    try:
        found = [documents(address, cache=str(tmp_path / "copies"))().fingerprint for _ in range(2)]
        with pytest.raises(DataError, match=r"a.parquet.no does not exist, or holds no file; check the address"):
            documents(f"{address}.no")()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
    assert asked[:3] == ["HEAD", "GET", "HEAD"], "copied once"
    assert found == [documents(path)().fingerprint] * 2
    assert documents(address, cache=str(tmp_path / "copies"))().fingerprint == found[0]
    assert "reading the copy in" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"cannot be reached .*; check the address and the network"):
        documents(f"{address}.other")()
