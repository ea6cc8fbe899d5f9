"""Metric files: strict JSON lines, and what a resume drops."""

import json
import types

import numpy as np
import pytest

from jaxtrain.config.schema import LoggingConfig
from jaxtrain.errors import ConfigError
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
        pytest.param(None, None, id="none"),
        pytest.param(float("nan"), None, id="nan"),
        pytest.param(float("inf"), None, id="infinity"),
        pytest.param(float("-inf"), None, id="minus-infinity"),
        pytest.param(np.float32(0.5), 0.5, id="numpy-float"),
        pytest.param(np.int64(3), 3, id="numpy-int"),
        pytest.param(np.float32("nan"), None, id="numpy-nan"),
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


@pytest.mark.parametrize("value", ["2.5", {}, 1 + 2j, np.complex64(1), np.array(1j)], ids=repr)
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
        pytest.param("", 5, "", id="empty"),
        pytest.param(_ROW % 1 + _ROW % 5, 5, _ROW % 1 + _ROW % 5, id="nothing-to-drop"),
        pytest.param(_ROW % 1 + _ROW % 5 + _ROW % 6, 5, _ROW % 1 + _ROW % 5, id="later-steps"),
        pytest.param(_ROW % 1 + '{"step": 2, "lo', 5, _ROW % 1, id="torn-last-line"),
        pytest.param(_ROW % 1 + '{"step": 2}', 5, _ROW % 1, id="last-line-without-end"),
        pytest.param(_ROW % 1 + '{"st' + _ROW % 2 + _ROW % 3, 5, _ROW % 1 + _ROW % 3, id="torn-inside"),
        pytest.param(_ROW % 1 + "\0\0\0\n", 5, _ROW % 1, id="zeros-after-power-loss"),
        pytest.param(_ROW % 1 + _ROW % 2, 0, "", id="fresh-start"),
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


def test_without_tensorboard_nothing_else_is_written(tmp_path):
    writer = open_writers(tmp_path, LoggingConfig(tensorboard=False), resumed_step=0)
    writer.scalars(1, {"loss": 0.5})
    writer.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


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
