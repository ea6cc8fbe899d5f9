"""Metric files: strict JSON lines, what a resume drops, what a full disk keeps waiting, the last metrics of a run."""

import errno
import json
import math
import os
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config.schema import LoggingConfig
from jaxtrain.errors import ConfigError, StorageError
from jaxtrain.metrics import lasting
from jaxtrain.metrics.history import last_evaluation, last_metrics
from jaxtrain.metrics.lasting import LastingWriter
from jaxtrain.metrics.writers import JsonlWriter, MultiWriter, open_writers, row_of


def _refuse(constant):
    raise AssertionError(f"{constant} is not strict JSON")


def _rows(path):
    return [json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        pytest.param(1.5, 1.5, id="float"),
        pytest.param(7, 7, id="int"),
        pytest.param(float("nan"), None, id="nan"),
        pytest.param(float("inf"), None, id="infinity"),
        pytest.param(np.array(2.5, np.float32), 2.5, id="numpy-0d"),
    ],
)
def test_jsonl_writes_strict_json(tmp_path, value, written):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.scalars(3, {"loss": value})
    # Read before the close: a killed run must have its rows on disk.
    assert _rows(writer.path) == [{"step": 3, "loss": written}]
    assert isinstance(_rows(writer.path)[0]["loss"], type(written))
    writer.close()
    writer.close()


@pytest.mark.parametrize("value", ["2.5", 1 + 2j], ids=repr)
def test_jsonl_refuses_what_is_no_real_number(tmp_path, value):
    with pytest.raises(ConfigError, match=r"scalars: 'loss' takes one real number, not .*; write float"):
        JsonlWriter(tmp_path / "metrics.jsonl").scalars(1, {"loss": value})


def test_jsonl_keeps_text(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.text(4, "sample", 'two\nlines "é" \ud800')
    writer.close()
    assert _rows(writer.path) == [{"step": 4, "sample": 'two\nlines "é" \ud800'}]


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


def test_open_writers_drops_later_rows_and_writes_both(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(_ROW % 10 + _ROW % 20)
    writer = open_writers(tmp_path, LoggingConfig(), resumed_step=10)
    writer.scalars(20, {"loss": 0.5})
    writer.close()
    assert [row["loss"] for row in _rows(tmp_path / "metrics.jsonl")] == [1.0, 0.5]
    assert list((tmp_path / "tensorboard").iterdir())


def test_every_writer_is_closed_although_one_fails():
    closed = []

    def writer(name, error=None):
        def close():
            closed.append(name)
            if error:
                raise error

        return types.SimpleNamespace(close=close)

    with pytest.raises(OSError, match="disk full"):
        MultiWriter([writer("a", OSError("disk full")), writer("b")]).close()
    assert closed == ["a", "b"]


def test_a_tensor_that_is_no_array_is_a_number(tmp_path):
    """As one of torch that needs a gradient: `float` takes it, and NumPy does not."""

    class Tensor:
        dtype, shape, ndim = "torch.float32", (), 0

        def __float__(self):
            return 2.5

        def __array__(self, *arguments, **more):
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")

    assert row_of(1, {"loss": Tensor()}) == {"step": 1, "loss": 2.5}


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
    "a metric that the last evaluation lacks": ([_GOOD | {"eval_f1": 1.0}, _LOST | {"eval_loss": 1.0}], (4, 1.0), 1.5),
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


@pytest.mark.parametrize("rows", [[], [{"step": 1, "loss": 1.0}]], ids=["no rows", "no evaluation"])
def test_without_an_evaluation_there_is_none(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    assert last_evaluation(_write(tmp_path / "metrics.jsonl", rows)) == {}


def test_an_opened_run_shows_that_its_last_evaluation_was_not_finite(tmp_path: Path) -> None:
    config = jt.load_config({"name": "a"}).config.model_dump(mode="json")
    (tmp_path / "run.json").write_text(json.dumps({"status": "done", "config": config}))
    _write(tmp_path / "metrics.jsonl", [_GOOD, {"step": 6, "loss": None, "learning_rate": None, "eval_loss": None}])
    run = jt.open_run(tmp_path)
    assert run.metrics == pytest.approx({"step": 6, "eval_loss": math.nan}, nan_ok=True)
    assert "step 6, loss nan, eval_loss nan" in repr(run)
    cells = re.sub(r"<[^>]+>", " ", run._repr_html_()).split()
    assert cells[cells.index("eval_loss") + 1] == "nan"
