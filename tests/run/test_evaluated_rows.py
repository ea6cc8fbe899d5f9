"""Which held-out rows a run evaluates where it takes no more than some: spread over all, the same ones everywhere."""

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
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.evaluation import Evaluator, dividing_batch, held_out_batches

HELD_OUT, BATCH, MOST = 96, 8, 3
PICKED = evaluated_numbers(HELD_OUT, BATCH * MOST)


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
    size = dividing_batch(config, sharded, jt.classification())
    held_out = held_out_batches(config, given, size=size, max_batches=most)
    assert (held_out.num_rows, len(held_out)) == (num_rows, num_batches)
    loader = Evaluator(sharded, jt.classification()).feed.loader(held_out)
    batches = [loader(number) for number in range(num_batches)]
    found = np.concatenate([np.asarray(batch["inputs"])[np.asarray(batch["weights"]) > 0, 0] for batch in batches])
    np.testing.assert_array_equal(found, evaluated_numbers(70, num_rows))


def test_a_loss_over_the_batch_is_evaluated_in_batches_of_the_run_alone():
    config = load_config({**CONFIG, "train": {"steps": 4, "global_batch_size": 6}}).config
    model = jt.from_functions(lambda key: {"w": np.ones((1, 3), np.float32)}, lambda params, x: x @ params["w"])
    task = jt.Task("contrastive", jt.classification().loss, rows="global")

    def found(shards):
        sharded = jt.shard_model(model, mesh=jt.make_mesh(data=shards, devices=jax.devices()[:shards]))
        return dividing_batch(config, sharded, task)

    assert found(3) == 6
    with pytest.raises(ConfigError, match=r"the 4 shards .*use 3 devices, .*global_batch_size=8") as error:
        found(4)
    assert "\n" not in str(error.value)


def test_a_config_evaluates_all_rows_where_it_names_no_limit():
    config = load_config(CONFIG).config
    rows, size = jt.ArrayRows({"inputs": np.zeros((9000, 1), np.float32)}), config.train.global_batch_size
    assert held_out_batches(config, rows, size=size, max_batches=config.evaluation.max_batches).num_rows == 9000
