"""What a run keeps for its report: single held-out rows, and where its time went, through failures and resumes."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import TINY, rows

import jaxtrain as jt
from jaxtrain.data.rows import ArrayRows
from jaxtrain.data.sources.dataset import Data

_CLASSES = 3


def _data(shape: tuple[int, ...], num_rows: int) -> Data:
    """Rows whose first number is the prediction of `_model`, and targets that are wrong in every fifth row."""
    columns = []
    for seed, count in ((0, 64), (1, num_rows)):
        rng = np.random.default_rng(seed)
        inputs = rng.normal(size=(count, *shape)).astype(np.float32)
        guess = rng.integers(0, _CLASSES, count)
        inputs.reshape(count, -1)[:, 0] = guess
        targets = np.where(np.arange(count) % 5 == 0, (guess + 1) % _CLASSES, guess).astype(np.int32)
        columns.append({"inputs": inputs, "targets": targets})
    return Data(
        train=ArrayRows(columns[0]),
        validation=ArrayRows(columns[1]),
        fingerprint={"kind": "made", "shape": list(shape)},
        vocab_size=None,
        num_outputs=_CLASSES,
        input_shape=shape,
        unit="examples",
        units_per_row=1,
        tokenizer=None,
        description=("made rows",),
    )


def _model() -> jt.Model:
    """Is sure of the class in the first number of a row; its one parameter only shifts all logits alike."""

    def apply(params: Any, inputs: Any) -> Any:
        number = inputs.reshape(len(inputs), -1)[:, :1].astype(jnp.float32)
        return params["shift"] - 4.0 * jnp.square(jnp.arange(_CLASSES, dtype=jnp.float32) - number)

    return jt.from_functions(lambda key: {"shift": jnp.zeros(())}, apply)


def _train(run_dir: Path, data: Data, **overrides: Any) -> jt.Result:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return jt.run_config(
        {**TINY, "task": "classification", "optimizer": {"kind": "sgd", "learning_rate": 0.1}},
        run_dir=run_dir,
        overrides={"train.steps": 2, "train.global_batch_size": 16, "logging.report": True, **dotted},
        model=_model(),
        task=jt.classification(),
        data=data,
    )


# 37 rows do not divide by the 16 of a batch: the last batch is filled up, and what fills it must not be counted.
@pytest.mark.parametrize(
    "shape", [pytest.param((4, 4, 1), id="images", marks=pytest.mark.long), pytest.param((5,), id="table")]
)
def test_the_confusions_of_a_mesh_are_those_that_are_counted_by_hand(tmp_path: Path, shape: tuple[int, ...]) -> None:
    data = _data(shape, 37)
    _train(tmp_path, data, evaluation__max_batches=None)
    found = json.loads((tmp_path / "held_out.json").read_text())
    assert data.validation is not None
    columns: Any = [data.validation[index] for index in range(37)]
    targets = [int(row["targets"]) for row in columns]
    guesses = [int(row["inputs"].reshape(-1)[0]) for row in columns]
    counted: dict[tuple[int, int], int] = {}
    for pair in zip(targets, guesses, strict=True):
        counted[pair] = counted.get(pair, 0) + 1
    assert {(target, guess): count for target, guess, count in found["matrix"]} == counted
    assert (found["rows"], found["right"], found["step"]) == (37, 29, 2)
    wrong = {index for index in range(37) if targets[index] != guesses[index]}
    assert {mistake["row"] for mistake in found["mistakes"]} == wrong
    assert [mistake["loss"] for mistake in found["mistakes"]] == sorted(
        (mistake["loss"] for mistake in found["mistakes"]), reverse=True
    )
    # Logits 0, -4 and -16 of the guess and its neighbours.
    assert found["mistakes"][0]["confidence"] > 0.9
    assert all((mistake["picture"] is not None) == (len(shape) == 3) for mistake in found["mistakes"])
    assert "29 of 37 held-out rows were classified correctly after step 2" in (tmp_path / "report.html").read_text()


@pytest.mark.long
def test_time_parameters_and_resumes_are_recorded_and_survive(tmp_path: Path) -> None:
    data = _data((5,), 20)
    _train(tmp_path, data)
    first = json.loads((tmp_path / "run.json").read_text())
    assert sum(first["seconds"].values()) == pytest.approx(first["final"]["wall_seconds"], abs=0.02)  # rounded to 0.01
    assert first["seconds"]["steps"] > 0
    assert first["parameters"] == {"shift": "float32[]"}
    assert (first["task"], first["resumed_after"]) == ("classification", [])
    _train(tmp_path, data, train__steps=4)
    second = json.loads((tmp_path / "run.json").read_text())
    assert second["resumed_after"] == [2]
    for part, seconds in first["seconds"].items():
        assert second["seconds"][part] >= seconds
    assert max(row["step"] for row in rows(tmp_path)) == 4


def test_a_failure_leaves_the_run_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr("jaxtrain.run.evaluation._mistakes", fail)
    assert _train(tmp_path, _data((5,), 20)).step == 2
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "done"
    assert "the report has no confusion matrix, because computing it failed: out of memory" in capfd.readouterr().err
    assert not (tmp_path / "held_out.json").exists()
