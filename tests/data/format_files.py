"""Tiny files of every format with the same rows, made in a test."""

import gzip
import io
import json
import tarfile

import numpy as np
import pyarrow
from pyarrow import ipc, parquet

ROWS_PER_GROUP = 7


def write_rows(path, form, rows):
    """Write rows as a file, or a folder, of a format, and return its path.

    Args:
        path: folder, which exists.
        form: `lines`, `lines.gz`, `lines.zst`, `parquet`, `arrow`, `arrow_file`, `saved`, `array_record` or `tar`.
        rows: dicts with equal keys.
    """
    if form.startswith("lines"):
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        pack = {"lines": bytes, "lines.gz": gzip.compress, "lines.zst": zstd}[form]
        file = path / f"a.jsonl{form.removeprefix('lines')}"
        file.write_bytes(pack(lines))
        return file
    if form == "array_record":
        return write_array_record(path / "a.array_record", [json.dumps(row).encode() for row in rows])
    if form == "tar":
        return write_tar(path / "a.tar", [(f"{i:04d}.json", json.dumps(row).encode()) for i, row in enumerate(rows)])
    table = pyarrow.Table.from_pylist(rows)
    if form == "parquet":
        parquet.write_table(table, path / "a.parquet", row_group_size=ROWS_PER_GROUP)
        return path / "a.parquet"
    if form == "saved":
        # What save_to_disk of datasets writes: streams, and the list of them.
        half = len(rows) // 2
        for i, part in enumerate((table.slice(0, half), table.slice(half))):
            write_stream(path / f"data-0000{i}-of-00002.arrow", part)
        names = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in range(2)]
        (path / "state.json").write_text(json.dumps({"_data_files": names, "_split": None}))
        (path / "dataset_info.json").write_text("{}")
        return path
    if form == "arrow_file":
        with ipc.new_file(str(path / "b.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=ROWS_PER_GROUP)
        return path / "b.arrow"
    return write_stream(path / "a.arrow", table)


def write_stream(path, table):
    with ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=ROWS_PER_GROUP)
    return path


def write_array_record(path, records):
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def zstd(content):
    return pyarrow.compress(content, codec="zstd", asbytes=True)


def png(number, size=12):
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
