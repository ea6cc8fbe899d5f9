"""A run that is opened or resumed with other data: all held-out rows are evaluated, or one line."""

import json
from pathlib import Path
from typing import Any

import pytest

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.inference.open import saved_config

QUIET = {"train.steps": 1, "logging.report": False, "logging.tensorboard": False}
TEXTS = {"data.kind": "labelled_text", "data.path": "a.csv", "data.validation_path": "b.csv"}
PAIRS = {"data.kind": "text_pairs", "data.path": "a.csv"}
# The keys of a run with a file for evaluation, further ones, whether that file would be evaluated instead.
HIDDEN: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "labelled": (TEXTS, {"data.path": "t.csv"}, True),
    "no file for evaluation": (PAIRS, {"data.path": "t.csv"}, False),
    "a part of it": (TEXTS, {"data.path": "t.csv", "data.validation_path": None}, False),
}


@pytest.mark.parametrize(("run", "further", "is_refused"), HIDDEN.values(), ids=HIDDEN)
def test_other_rows_are_not_passed_over_for_the_file_for_evaluation(
    run: dict[str, Any], further: dict[str, Any], is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "a.csv"):
        (tmp_path / name).touch()
    saved = load_config(keywords=run).config.model_dump(mode="json")
    (tmp_path / "run.json").write_text(json.dumps({"format_version": 1, "config": saved, "data": {}}))
    if not is_refused:
        assert saved_config(tmp_path, overrides=further).config.data.path == "t.csv"
        return
    said = r"^the run evaluates data\.validation_path=b\.csv; give that key in place of data\.path"
    with pytest.raises(ConfigError, match=said):
        saved_config(tmp_path, overrides=further)


@pytest.mark.parametrize(
    "kind", ["table", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("labelled_text", "text"))]
)
def test_all_rows_of_other_data_are_evaluated(kind: str, tmp_path: Path) -> None:
    model: dict[str, Any] = {"kind": "mlp", "hidden_dims": [4]}
    if kind != "table":
        model = {"kind": "transformer", "num_layers": 1, "embed_dim": 8, "num_heads": 2, "max_sequence_length": 8}
    if kind == "labelled_text":
        model |= {"causal": False, "head": {"kind": "sequence"}}
    for name, count in (("a", 40), ("b", 31)):
        header = "" if kind == "text" else f"{'x' if kind == 'table' else 'text'},label\n"
        rows = "".join(f"{i},{'yn'[i % 2]}\n" for i in range(10, 10 + count))
        (tmp_path / f"{name}.{'txt' if kind == 'text' else 'csv'}").write_text(header + rows)
    config = {"model": model, "data": {"kind": kind, "path": str(next(tmp_path.glob("a.*")))}}
    config |= {} if kind == "text" else {"task": "classification"}
    jt.run_config({**config, **QUIET, "train.global_batch_size": 8}, run_dir=tmp_path / "run")
    other = {"data.path": str(next(tmp_path.glob("b.*"))), "data.validation_fraction": 1}
    run = jt.open_run(tmp_path / "run", overrides=other)
    assert run.held_out().num_rows == (31 * 5 // 8 if kind == "text" else 31)
    assert run.evaluate()["eval_loss"] > 0
    with pytest.raises(ConfigError, match=r"data\.validation_fraction=1 leaves no rows to train on; give less, or"):
        jt.open_data({"kind": kind, "path": other["data.path"], "validation_fraction": 1}, sequence_length=8)
