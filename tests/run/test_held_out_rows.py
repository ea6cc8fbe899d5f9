"""Held-out rows of a run: which are evaluated, and in batches that divide by the mesh."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.data.evaluated import evaluated_numbers
from jaxtrain.errors import ConfigError
from jaxtrain.run.evaluation import Evaluator
from jaxtrain.run.held_out_rows import held_out_rows

CONFIG = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}}

LIMITS = {"two batches": (2, 40, 2), "one batch": (1, 20, 1), "more than there are": (9, 70, 3), "all": (None, 70, 3)}


@pytest.mark.parametrize("read", ["at once", "one by one"])
@pytest.mark.parametrize("case", LIMITS)
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


@pytest.mark.parametrize("rows", ["global", "microbatch"])
def test_a_loss_over_the_batch_is_evaluated_in_batches_of_the_run_alone(rows):
    config = load_config({**CONFIG, "train": {"steps": 4, "global_batch_size": 6}}).config
    given = jt.ArrayRows({"inputs": np.ones((12, 1), np.float32), "targets": np.zeros(12, np.int32)})
    model = jt.from_functions(lambda key: {"w": np.ones((1, 3), np.float32)}, lambda params, x: x @ params["w"])
    task = jt.Task("contrastive", jt.classification().loss, rows=rows)

    def found(shards):
        sharded = jt.shard_model(model, mesh=jt.make_mesh(data=shards, devices=jax.devices()[:shards]))
        return held_out_rows(config, given, sharded, task=task, max_batches=None)

    assert (found(3).num_batches, found(3).remarks) == (2, ())
    with pytest.raises(ConfigError, match=r"does not divide by the 4 shards .*data=3, .*global_batch_size=8") as error:
        found(4)
    assert "\n" not in str(error.value)
