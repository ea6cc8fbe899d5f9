"""Which held-out rows a run evaluates where it takes no more than some: spread over all, the same ones everywhere."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.data.evaluated import evaluated_numbers
from jaxtrain.data.rows import selected_rows

HELD_OUT, BATCH, MOST = 96, 8, 3
PICKED = evaluated_numbers(HELD_OUT, BATCH * MOST)

ORDERS = {
    "sorted": lambda classes, each: np.repeat(np.arange(classes), each),
    "in turn": lambda classes, each: np.tile(np.arange(classes), each),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("classes", "each", "most"),
    [(4, 250, 100), (10, 100, 100), (3, 50, 100), (5, 200, 600), (5, 200, 800), (10, 400, 1600), (10, 1000, 1600)],
)
def test_every_class_has_about_its_share(order: str, classes: int, each: int, most: int) -> None:
    counts = np.bincount(ORDERS[order](classes, each)[evaluated_numbers(classes * each, most)])
    np.testing.assert_allclose(counts, most / classes, atol=max(2, 0.04 * most / classes))


@pytest.mark.parametrize(("num_rows", "most"), [(7, 3), (101, 100), (248, 100), (10**6, 10**3), (3, 1), (2, 1)])
def test_spread_rows_are_different_ones_in_their_order(num_rows: int, most: int) -> None:
    numbers = evaluated_numbers(num_rows, most)
    assert len(numbers) == most
    assert (np.diff(numbers) > 0).all()
    assert 0 <= numbers[0] <= numbers[-1] < num_rows


def test_all_rows_are_taken_where_there_are_no_more() -> None:
    assert evaluated_numbers(9, None).tolist() == evaluated_numbers(9, 9).tolist() == list(range(9))


VALUES = np.arange(HELD_OUT, dtype=np.float32)[:, None] ** 2


def loss(outputs: Any, batch: Any) -> Any:
    weights = batch.get("weights", jnp.ones(len(outputs)))
    return jnp.sum(outputs[:, 0] * weights), jnp.sum(weights), {}


def train(run_dir: Path, steps: int, *, most: int = MOST, devices: int = 1, patience: int | None = None) -> float:
    """The evaluation loss is the mean of the evaluated inputs, whatever the model learns."""
    model = jt.from_functions(lambda key: {"w": jnp.zeros(())}, lambda params, x: x + 0 * params["w"], name="inputs")
    result = jt.fit(
        model,
        jt.Task("mean", loss),
        optax.sgd(0.0),
        data=jt.ArrayRows({"inputs": np.zeros((32, 1), np.float32)}),
        validation=jt.ArrayRows({"inputs": VALUES}),
        steps=steps,
        batch_size=BATCH,
        mesh=jt.make_mesh(data=devices, devices=jax.devices()[:devices]),
        run_dir=run_dir,
        evaluation={"max_batches": most, "every": 1},
        checkpoint={"every": 1},
        callbacks=[] if patience is None else [jt.EarlyStopping(patience=patience)],
        overrides={"logging.report": False, "logging.tensorboard": False},
    )
    return result.metrics["eval_loss"]


def noted(run_dir: Path) -> Any:
    return json.loads((run_dir / "run.json").read_text())["evaluated_rows"]


@pytest.mark.parametrize("devices", [1, 4])
def test_training_evaluates_spread_rows_on_any_layout(tmp_path: Path, devices: int) -> None:
    assert train(tmp_path, 1, devices=devices) == pytest.approx(VALUES[PICKED].mean(), rel=1e-6)
    assert noted(tmp_path) == {"count": BATCH * MOST, "after": 0}


def test_training_eval_and_the_report_take_the_same_rows_of_a_sorted_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, count in (("train", 40), ("dev", HELD_OUT)):
        texts = [{"text": f"{label} {number}", "label": label} for label in "ab" for number in range(count // 2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, texts)))
    config = {
        "task": "classification",
        "model": {
            "kind": "transformer",
            "num_layers": 1,
            "embed_dim": 8,
            "num_heads": 2,
            "head": {"kind": "sequence", "pooling": "mean"},
        },
        "data": {
            "kind": "labelled_text",
            "path": str(tmp_path / "train.jsonl"),
            "validation_path": str(tmp_path / "dev.jsonl"),
            "text": "text",
            "label": "label",
            "sequence_length": 8,
        },
        "train": {"steps": 1, "global_batch_size": BATCH},
        "evaluation": {"max_batches": MOST},
        "logging": {"report": True, "tensorboard": False},
    }
    result = jt.run_config(config, run_dir=tmp_path / "run")
    capfd.readouterr()
    run = jt.open_run(tmp_path / "run")
    assert run.evaluate()["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-5)
    assert "evaluation: 24 of 96 held-out rows, spread over all of them" in capfd.readouterr().err
    assert run.data.validation is not None
    picked = run.evaluate(selected_rows(run.data.validation, PICKED))
    assert picked["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-5)
    found = json.loads((tmp_path / "run" / "held_out.json").read_text())
    assert (found["rows"], found["right"]) == (24, round(24 * picked["eval_accuracy"]))
    rows: Any = run.data.validation
    shares = [sum(count for target, _, count in found["matrix"] if target == label) for label in (0, 1)]
    np.testing.assert_allclose(shares, [12, 12], atol=1)
    assert all(mistake["row"] in PICKED for mistake in found["mistakes"])
    assert all(rows[mistake["row"]]["targets"] == mistake["target"] for mistake in found["mistakes"])
