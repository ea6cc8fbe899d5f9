"""What records show of themselves: a few lines without arrays."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.metrics.writers import JsonlWriter
from jaxtrain.run.trainer import Result
from jaxtrain.runtime.files import write_json_atomic

NAME = "mine"


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Records of one run."""
    folder = tmp_path_factory.mktemp("runs")
    data = jt.open_data({"kind": "digits"})
    data = dataclasses.replace(data, description=(NAME,))
    model = jt.from_functions(lambda key: {"w": jax.random.normal(key, (64, 8))}, lambda p, x: x @ p["w"], name=NAME)
    task = jt.Task(NAME, lambda outputs, batch: (outputs.sum(), np.float32(1), {}))
    mesh = jt.make_mesh(data=2, fsdp=4)
    step = jt.make_train_step(model, task, optax.adam(1e-3), mesh=mesh)
    config = jt.load_config({"name": "a & b", "train.steps": 7}).config
    info = {"status": "running", "config": config.model_dump(mode="json"), "model": {"name": NAME, "num_parameters": 5}}
    write_json_atomic(folder / "run.json", info)
    with JsonlWriter(folder / "metrics.jsonl") as writer:
        for k in range(1, 4):
            writer.scalars(k, {"loss": 1 / k, "eval_loss": 2.0})
    state = step.init(0)
    return {
        "Model": model,
        "ShardedModel": step.sharded_model,
        "TrainStep": step,
        "Data": data,
        "Batches": jt.Batches(data.train, 32, seed=0, shuffle=True),
        "Result": Result(folder, state, {}, 3),
        "Run": jt.open_run(folder),
        "TrainState": state,
    }


# What a person asks first of each.
SAYS = {
    "Model": ["512 parameters in 1 array"],
    "ShardedModel": ["512 parameters", "data=2 fsdp=4", "fp32"],
    "TrainStep": [f"for {NAME!r}", "data=2 fsdp=4"],
    "Data": ["1,438 training rows, 359 held out, inputs [8, 8, 1], 10 outputs"],
    "Batches": ["32 of 1,438 rows, shuffled", "inputs float32[32, 8, 8, 1]", "targets int32[32]"],
    "Result": ["running (7 steps)", "loss 0.33333"],
    "Run": ["running (7 steps)", "step 3", "checkpoints: none"],
    "TrainState": ["1 arrays of parameters, 3 of optimizer state"],
}


def test_text_is_short(records):
    for name, wanted in SAYS.items():
        text = repr(records[name])
        assert text.count("\n") < 4, name
        assert len(text) < 600, name
        assert "rray(" not in text, name
        assert [words for words in wanted if words not in text] == [], name
