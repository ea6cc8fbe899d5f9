"""The last metrics of a run are those of its last rows that have them, also where they are not finite."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import jaxtrain as jt
from jaxtrain.metrics.history import last_evaluation, last_metrics


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
