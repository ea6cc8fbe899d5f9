"""`overrides` may not set otherwise what an argument of `fit` sets: run.json would say what was not trained."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt

ROWS = {
    "inputs": np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32),
    "targets": np.arange(32, dtype=np.int32) % 2,
}


def two_devices() -> Any:
    return jt.make_mesh(data=2, devices=jax.devices()[:2])


def fit(run_dir: Path, **changes: Any) -> jt.Result:
    model = jt.build_model({"kind": "mlp", "hidden_dims": [4]}, input_shape=(8,), num_outputs=2)
    settings: dict[str, Any] = dict(data=ROWS, validation=ROWS, steps=2, batch_size=16, mesh=two_devices())
    settings |= dict(logging={"report": False, "tensorboard": False}, run_dir=run_dir, **changes)
    return jt.fit(model, jt.classification(), optax.sgd(0.1), **settings)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (dict(overrides={"parallel": {"data": 8}}), "mesh sets parallel.data=2, and overrides set parallel.data=8"),
        (
            dict(parallelism=jt.Parallelism(zero=1), overrides={"parallel.zero": 0}),
            "parallelism sets parallel.zero=1, and overrides set parallel.zero=0",
        ),
        (
            dict(evaluation={"every": 5}, overrides={"evaluation.every": 7}),
            "evaluation sets evaluation.every=5, and overrides set evaluation.every=7",
        ),
        (
            dict(finetune={"lora": {"rank": 4}}, overrides={"finetune": {"lora": {"rank": 2}}}),
            "finetune sets finetune.lora.rank=4, and overrides set finetune.lora.rank=2",
        ),
    ],
    ids=["mesh", "parallelism", "evaluation", "finetune"],
)
def test_what_is_set_twice_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(jt.ConfigError) as caught:
        fit(tmp_path / "run", **changes)
    assert str(caught.value) == f"{line}; leave one of them out"
    assert not (tmp_path / "run").exists()


def test_what_is_set_twice_alike_or_by_one_of_them_is_trained(tmp_path: Path) -> None:
    parallelism = jt.Parallelism(schedule="gpipe")  # zero is left at its default
    overrides = {"parallel": {"data": 2, "zero": 1}, "evaluation.every": np.int64(2), "evaluation.max_batches": 1}
    result = fit(tmp_path, parallelism=parallelism, evaluation={"every": 2}, overrides=overrides)
    assert result.step == 2
    config = json.loads((tmp_path / "run.json").read_text())["config"]
    assert (config["parallel"]["data"], config["parallel"]["zero"], config["evaluation"]["every"]) == (2, 1, 2)
