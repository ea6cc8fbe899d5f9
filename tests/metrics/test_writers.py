"""Metric files and TensorBoard events: strict lines, resumes, full disks, the last metrics of a run, thumbnails."""

import errno
import io
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image
from tensorboard_events import read_events
from tensorboardX.record_writer import RecordWriter

from jaxtrain.config.schema import LoggingConfig
from jaxtrain.errors import StorageError
from jaxtrain.metrics import writers
from jaxtrain.metrics.history import last_evaluation, last_metrics
from jaxtrain.metrics.media import thumbnail
from jaxtrain.metrics.writers import JsonlWriter, LastingWriter, TensorBoardWriter, open_writers


def _refuse(constant):
    raise AssertionError(f"{constant} is not strict JSON")


def _rows(path):
    return [json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines()]


def test_jsonl_writes_strict_json(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    values = {"a": 1.5, "b": 7, "c": math.nan, "d": math.inf, "e": np.array(2.5, np.float32), "f": None}
    writer.scalars(3, values)
    writer.text(4, "sample", 'two\nlines "é" \ud800')
    # Read before the close: a killed run must have its rows on disk.
    numbers = '{"step": 3, "a": 1.5, "b": 7, "c": null, "d": null, "e": 2.5, "f": null}'
    assert writer.path.read_text().splitlines()[0] == numbers
    assert _rows(writer.path)[1] == {"step": 4, "sample": 'two\nlines "é" \ud800'}
    with pytest.raises(TypeError):
        writer.scalars(5, {"loss": "2.5"})  # pyright: ignore
    writer.close()
    writer.close()


_ROW = '{"step": %d, "loss": 1.0}\n'


@pytest.mark.parametrize(
    ("before", "step", "after"),
    [
        pytest.param(None, 5, None, id="no-file"),
        pytest.param(_ROW % 1 + _ROW % 5 + _ROW % 6, 5, _ROW % 1 + _ROW % 5, id="later-steps"),
        pytest.param(_ROW % 1 + '{"step": 2, "lo', 5, _ROW % 1, id="torn-last-line"),
        pytest.param(_ROW % 1 + '{"st' + _ROW % 2 + _ROW % 3, 5, _ROW % 1 + _ROW % 3, id="torn-inside"),
        pytest.param(_ROW % 1 + "\0\0\0\n", 5, _ROW % 1, id="zeros-after-power-loss"),
    ],
)
def test_truncate_after(tmp_path, before, step, after):
    path = tmp_path / "metrics.jsonl"
    if before is not None:
        path.write_text(before)
    writer = JsonlWriter(path)
    writer.truncate_after(step)
    assert (path.read_text() if path.exists() else None) == after
    assert [entry.name for entry in tmp_path.iterdir()] == ([path.name] if before is not None else [])
    writer.scalars(step + 1, {"loss": 2.0})
    writer.close()
    assert _rows(path)[-1] == {"step": step + 1, "loss": 2.0}


def test_rows_wait_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "MOST_WAITING", 2)
    lines: list[str] = []
    writer = LastingWriter(tmp_path / "metrics.jsonl", lines.append)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full(*steps: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(JsonlWriter, "append", refuse)
            for step in steps:
                writer.scalars(step, {"loss": 1.0})

    full(1, 2)
    writer.scalars(3, {"loss": 1.0})
    assert [row["step"] for row in _rows(writer.path)] == [2, 3]
    assert [line.rpartition("; ")[2] for line in lines[:1]] == ["rows stay in memory"]
    assert len(lines) == 2
    with pytest.raises(StorageError, match="1 rows of metrics could not be written"):
        writer.close()


def losses(run_dir: Path) -> dict[int, float]:
    """step -> the loss that TensorBoard shows: a start hides later steps before it; each is there once."""
    from tensorboardX.proto.event_pb2 import SessionLog

    found: list[tuple[int, float]] = []
    for event in read_events(run_dir / "tensorboard"):
        if event.session_log.status == SessionLog.START:
            found = [one for one in found if one[0] < event.step]
        found += [(event.step, value.simple_value) for value in event.summary.value if value.tag == "loss"]
    assert len(dict(found)) == len(found)
    return dict(found)


def write(run_dir: Path, steps: range, *, resumed_step: int = 0, loss: float = 1.0, tensorboard: bool = True) -> None:
    writer = open_writers(run_dir, LoggingConfig(tensorboard=tensorboard), resumed_step=resumed_step)
    for step in steps:
        writer.scalars(step, {"step": step, "loss": loss})
    writer.close()


@pytest.mark.parametrize("most", [3, 1000], ids=["the newest", "all"])
def test_a_resumed_run_writes_what_a_kill_kept_from_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(writers, "_ROWS_WRITTEN_AGAIN", most)
    write(tmp_path, range(1, 10), tensorboard=False)
    writer = TensorBoardWriter(tmp_path / "tensorboard")
    for step in range(1, 5):
        writer.scalars(step, {"loss": 1.0, "model_flops_utilization": None, "grad_norm": math.nan})
    writer.close()
    [path] = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes() + b"\xff" * 40)  # torn by the kill: read up to there
    write(tmp_path, range(7, 13), resumed_step=6, loss=2.0)
    assert losses(tmp_path) == dict.fromkeys(range(1, 7), 1.0) | dict.fromkeys(range(7, 13), 2.0)


def test_a_disk_that_hangs_keeps_no_step_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = threading.Event()
    monkeypatch.setattr(writers, "COLLECTED_SECONDS", 0.01)
    monkeypatch.setattr(writers, "_END_SECONDS", 0.1)
    monkeypatch.setattr(RecordWriter, "flush", lambda self: blocks.wait())
    writer = TensorBoardWriter(tmp_path)
    started = time.monotonic()
    for step in range(100):
        writer.scalars(step, {"loss": 1.0})
    writer.close()
    assert time.monotonic() - started < 20
    blocks.set()
    writer._thread.join(20)


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [((8, 6), np.float32, (8, 6)), ((100, 60, 3), np.uint8, (32, 19))],
    ids=["grey", "colour-averaged"],
)
def test_thumbnails_are_pictures_that_others_read(shape: tuple[int, ...], dtype: type, size: tuple[int, int]) -> None:
    values = np.random.default_rng(0).integers(0, 256, shape).astype(dtype)
    content = thumbnail(values)
    assert content is not None
    drawn = image.imread(io.BytesIO(content), format="png")
    assert drawn.shape[:2] == size
    if dtype is np.float32:
        # The smallest value is black and the largest white; PNG rounds to 1/255.
        np.testing.assert_allclose(drawn, (values - values.min()) / np.ptp(values), atol=0.5 / 255 + 1e-6)
    assert thumbnail(np.zeros(5)) is None
    assert thumbnail(np.full((4, 4), np.nan)) is None


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


_LOST, _GOOD = {"step": 4, "eval_loss": None}, {"step": 2, "loss": 1.5, "eval_loss": 0.3}
# Rows -> step and loss of the last evaluation, and the last training loss.
_CASES: dict[str, tuple[list[dict[str, Any]], tuple[int, float], float]] = {
    "the last evaluation is not finite": ([_GOOD, _LOST], (4, math.nan), 1.5),
    "the last loss is not finite": ([_GOOD, {"step": 3, "loss": None}], (2, 0.3), math.nan),
    "steps without an evaluation come after": ([_GOOD, {"step": 3, "loss": 1.25}], (2, 0.3), 1.25),
    "a step that was done again": ([_GOOD, _LOST, _LOST | {"eval_loss": 2.0}], (4, 2.0), 1.5),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "evaluated", "loss"), _CASES.values(), ids=_CASES)
def test_the_last_row_that_has_a_metric_counts(
    tmp_path: Path, rows: list[dict[str, Any]], evaluated: tuple[int, float], loss: float
) -> None:
    path = _write(tmp_path / "metrics.jsonl", rows)
    step, value = evaluated
    assert last_evaluation(path) == pytest.approx({"step": step, "eval_loss": value}, nan_ok=True)
    wanted = {"step": rows[-1]["step"], "loss": loss, "eval_loss": value}
    assert last_metrics(path, ("loss", "accuracy")) == pytest.approx(wanted, nan_ok=True)
