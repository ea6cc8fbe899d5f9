"""A run that is opened or resumed with other data: what is said of rows that were trained on, and of another kind."""

from pathlib import Path
from typing import Any

import pytest

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.run.resume import changes_since
from jaxtrain.run.saved_config import trained_rows_line

TABLE = {"data.kind": "table", "data.path": "rows.csv", "data.validation_fraction": 0.2}
TEXTS = {"data.kind": "labelled_text", "data.path": "a.csv", "data.validation_path": "b.csv"}
# The run's keys, further ones, whether some of the rows were trained on.
OPENED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "more rows": (TABLE, {"data.validation_fraction": 0.5}, True),
    "the same path in other words": (TABLE, {"data.path": "./rows.csv", "data.validation_fraction": 0.5}, True),
    "another key of the same rows": (TABLE, {"data.task": "regression", "data.validation_fraction": 0.5}, True),
    "fewer rows": (TABLE, {"data.validation_fraction": 0.1}, False),
    "another file": (TABLE, {"data.path": "others.csv", "data.validation_fraction": 0.5}, False),
    "rows of their own": (TEXTS, {"data.validation_fraction": 0.5}, False),
}


@pytest.mark.parametrize(("saved", "further", "is_said"), OPENED.values(), ids=OPENED)
def test_rows_that_were_trained_on(saved: dict[str, Any], further: dict[str, Any], is_said: bool) -> None:
    run, opened = (load_config(keywords=keys).config for keys in (saved, {**saved, **further}))
    line = trained_rows_line(run, opened)
    assert (line is not None) == is_said
    assert line is None or line.startswith("data.validation_fraction=0.5 holds out more than the run did (0.2)")


def test_an_opened_run_says_it(tmp_path: Path) -> None:
    config = {"data": {"kind": "digits"}, "model": {"kind": "mlp", "hidden_dims": [4]}, "task": "classification"}
    quiet = {"train.steps": 1, "logging.report": False, "logging.tensorboard": False}
    jt.run_config({**config, **quiet}, run_dir=tmp_path / "run")
    lines: list[str] = []
    overrides = {"data.validation_fraction": 0.5, "data.kind": "digits"}
    jt.open_run(tmp_path / "run", overrides=overrides, report=lines.append)
    assert [line.partition(" ")[0] for line in lines] == ["data.validation_fraction=0.5"]


def test_a_folder_of_another_kind_of_data_is_named(tmp_path: Path) -> None:
    def of(kind: str, stream: dict[str, Any]) -> dict[str, Any]:
        return {"config": {"data": {"kind": kind}}, "stream": stream}

    saved, current = of("text", {"sha256": "a"}), of("digits", {"rows": 3})
    with pytest.raises(
        DataError, match=r"holds a run on data\.kind=text, not digits; set it back, use another run dir"
    ):
        changes_since(saved, current, run_dir=tmp_path, may_change=True)


SAVED = {
    "config": {"seed": 0, "train": {"global_batch_size": 8}, "optimizer": {"learning_rate": 0.1}},
    "stream": {"kind": "digits", "sequence_length": 8, "seed": 0, "global_batch_size": 8},
}
RATE = {"optimizer": {"learning_rate": 0.2}}
# id: (other groups of the config, other parts of the stream, error, what its line says)
OTHER_BATCHES: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "seed": ({"seed": 1}, {"seed": 1}, ConfigError, "another configuration: seed 0 -> 1, which no resume changes; set"),
    "batch size": (
        {"train": {"global_batch_size": 16}},
        {"global_batch_size": 16},
        ConfigError,
        "another configuration: train.global_batch_size 8 -> 16, which no resume changes; set",
    ),
    "seed and more": (
        {"seed": 1, **RATE},
        {"seed": 1},
        ConfigError,
        "another configuration: seed 0 -> 1, which no resume",
    ),
    "a key of the model that makes other rows": (
        RATE,
        {"sequence_length": 4},
        DataError,
        "sequence_length was 8, is 4",
    ),
}


@pytest.mark.parametrize("may_change", [False, True], ids=["by default", "must"])
@pytest.mark.parametrize(("config", "stream", "error", "line"), OTHER_BATCHES.values(), ids=OTHER_BATCHES)
def test_no_advice_is_given_that_would_be_refused(
    tmp_path: Path, config: dict[str, Any], stream: dict[str, Any], error: type[Exception], line: str, may_change: bool
) -> None:
    """No `resume` goes on with other batches, so that none may be offered."""
    current = {"config": {**SAVED["config"], **config}, "stream": {**SAVED["stream"], **stream}}
    with pytest.raises(error) as caught:
        changes_since(SAVED, current, run_dir=tmp_path, may_change=may_change)
    assert line in str(caught.value)
    assert "must" not in str(caught.value)
    assert "; set it back, use another run directory" in str(caught.value)
