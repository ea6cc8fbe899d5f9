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
from jaxtrain.config import load_config
from jaxtrain.data.permutation import evaluated_numbers
from jaxtrain.data.rows import mean_tokens, selected_rows
from jaxtrain.errors import ConfigError
from jaxtrain.run.evaluation import Evaluator, held_out_rows

HELD_OUT, BATCH, MOST = 96, 8, 3
PICKED = evaluated_numbers(HELD_OUT, BATCH * MOST)


def test_every_class_has_about_its_share() -> None:
    for classes, each, most in ((4, 250, 100), (3, 50, 100), (5, 200, 600), (10, 1000, 1600)):
        for labels in (np.repeat(np.arange(classes), each), np.tile(np.arange(classes), each)):
            counts = np.bincount(labels[evaluated_numbers(classes * each, most)])
            np.testing.assert_allclose(counts, most / classes, atol=max(2, 0.04 * most / classes))


def test_spread_rows_are_different_ones_in_their_order() -> None:
    for num_rows, most in ((7, 3), (101, 100), (10**6, 10**3), (2, 1)):
        numbers = evaluated_numbers(num_rows, most)
        assert len(numbers) == most
        assert (np.diff(numbers) > 0).all()
        assert 0 <= numbers[0] <= numbers[-1] < num_rows
    assert evaluated_numbers(9, None).tolist() == evaluated_numbers(9, 9).tolist() == list(range(9))


VALUES = np.arange(HELD_OUT, dtype=np.float32)[:, None] ** 2


def loss(outputs: Any, batch: Any) -> Any:
    weights = batch.get("weights", jnp.ones(len(outputs)))
    return jnp.sum(outputs[:, 0] * weights), jnp.sum(weights), {}


def train(run_dir: Path, *, devices: int) -> float:
    """The evaluation loss is the mean of the evaluated inputs, whatever the model learns."""
    model = jt.from_functions(lambda key: {"w": jnp.zeros(())}, lambda params, x: x + 0 * params["w"], name="inputs")
    result = jt.fit(
        model,
        jt.Task("mean", loss),
        optax.sgd(0.0),
        data=jt.ArrayRows({"inputs": np.zeros((32, 1), np.float32)}),
        validation=jt.ArrayRows({"inputs": VALUES}),
        steps=1,
        batch_size=BATCH,
        mesh=jt.make_mesh(data=devices, devices=jax.devices()[:devices]),
        run_dir=run_dir,
        evaluation={"max_batches": MOST, "every": 1},
        checkpoint={"every": 1},
        overrides={"logging.report": False, "logging.tensorboard": False},
    )
    return result.metrics["eval_loss"]


def test_training_evaluates_spread_rows_on_any_layout(tmp_path: Path) -> None:
    assert train(tmp_path, devices=4) == pytest.approx(VALUES[PICKED].mean(), rel=1e-6)


@pytest.mark.long
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
    run = jt.open_run(tmp_path / "run")
    mean = mean_tokens(run.data.train)
    assert mean is not None
    assert result.metrics["tokens"] == round(BATCH * mean), "tokens are those of the texts, without padding"
    assert f"steps of {BATCH * mean:,.0f} tokens" in capfd.readouterr().err
    assert run.evaluate()["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-5)
    assert run.data.validation is not None
    picked = run.evaluate(selected_rows(run.data.validation, PICKED))
    assert picked["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-5)


CONFIG = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}}

LIMITS = {"two batches": (2, 40, 2), "all": (None, 70, 3)}


@pytest.mark.parametrize(("case", "read"), [("two batches", "at once"), ("all", "one by one")])
def test_a_limit_on_rows_is_that_of_the_run_on_any_mesh(case, read):
    """Batches of 20 rows become ones of 24, which divide by 8 devices; the same rows are evaluated as in the run."""
    most, num_rows, num_batches = LIMITS[case]
    config = load_config({**CONFIG, "train": {"steps": 4, "global_batch_size": 20}}).config
    rows = jt.ArrayRows({"inputs": np.arange(70.0, dtype=np.float32).reshape(70, 1), "targets": np.zeros(70, np.int32)})
    model = jt.from_functions(lambda key: {"w": np.ones((1, 3), np.float32)}, lambda params, x: x @ params["w"])
    sharded = jt.shard_model(model, mesh=jt.make_mesh(data=8))
    given = rows if read == "at once" else rows.map(dict)
    held_out = held_out_rows(config, given, sharded, task=jt.classification(), max_batches=most)
    assert (held_out.num_rows, held_out.num_batches) == (num_rows, num_batches)
    loader = Evaluator(sharded, jt.classification()).feed.loader(held_out.batches)
    batches = [loader(number) for number in range(held_out.num_batches)]
    found = np.concatenate([np.asarray(batch["inputs"])[np.asarray(batch["weights"]) > 0, 0] for batch in batches])
    np.testing.assert_array_equal(found, evaluated_numbers(70, num_rows))


def test_a_loss_over_the_batch_is_evaluated_in_batches_of_the_run_alone():
    config = load_config({**CONFIG, "train": {"steps": 4, "global_batch_size": 6}}).config
    given = jt.ArrayRows({"inputs": np.ones((12, 1), np.float32), "targets": np.zeros(12, np.int32)})
    model = jt.from_functions(lambda key: {"w": np.ones((1, 3), np.float32)}, lambda params, x: x @ params["w"])
    task = jt.Task("contrastive", jt.classification().loss, rows="global")

    def found(shards):
        sharded = jt.shard_model(model, mesh=jt.make_mesh(data=shards, devices=jax.devices()[:shards]))
        return held_out_rows(config, given, sharded, task=task, max_batches=None)

    assert found(3).num_batches == 2
    with pytest.raises(ConfigError, match=r"the 4 shards .*use 3 devices, .*global_batch_size=8") as error:
        found(4)
    assert "\n" not in str(error.value)
