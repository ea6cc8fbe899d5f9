"""Rows that no file holds at the end are said: they are never lost in silence."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.errors import StorageError
from jaxtrain.metrics import lasting
from jaxtrain.metrics.lasting import LastingWriter
from jaxtrain.metrics.writers import JsonlWriter


def refuse(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_rows_that_waited_too_long_are_missed_although_there_is_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting, "_MOST_WAITING", 2)
    writer = LastingWriter(JsonlWriter(tmp_path / "metrics.jsonl"), lambda line: None)
    with monkeypatch.context() as full:
        full.setattr("jaxtrain.metrics.row_file.RowFile.append", refuse)
        for step in (1, 2, 3):
            writer.scalars(step, {"loss": 1.0})
    writer.scalars(4, {"loss": 1.0})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    with pytest.raises(StorageError, match="rows of metrics are missing in "):
        writer.close()


def test_rows_are_counted_and_not_braces(tmp_path: Path) -> None:
    writer = LastingWriter(JsonlWriter(tmp_path / "metrics.jsonl"), lambda line: None)
    writer.text(1, "sample", "def f(): return {{}}")
    (tmp_path / "metrics.jsonl").unlink()
    assert not writer.is_in_place()
    assert writer.write_again() == "metrics.jsonl is written again (1 rows)"
    writer.close()
