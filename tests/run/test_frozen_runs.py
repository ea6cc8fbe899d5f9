"""Runs in bf16_pure whose frozen parameters stay float32, as they were drawn: they go on and can be opened."""

from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from training_runs import TINY, losses

import jaxtrain as jt

FREEZE = {"precision.policy": "bf16_pure", "optimizer.freeze": ["blocks/*"], "optimizer.ema_decay": None}


def kinds(params: dict) -> dict[str, set[str]]:
    return {name: {leaf.dtype.name for leaf in jax.tree.leaves(part)} for name, part in params.items()}


@pytest.mark.long
def test_a_run_of_a_config_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def train(name: str, steps: int) -> jt.Result:
        return jt.run_config(TINY, run_dir=tmp_path / name, overrides={**FREEZE, "train.steps": steps})

    found = kinds(train("whole", 4).state.params)
    assert found.pop("blocks") == {"float32"}
    assert set.union(*found.values()) == {"bfloat16"}
    assert kinds(jt.open_run(tmp_path / "whole").params) == {"blocks": {"float32"}, **found}
    train("stopped", 2)
    train("stopped", 4)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_a_run_from_python_is_opened_without_knowing_what_was_trained(tmp_path: Path) -> None:
    """In the dtype that the policy computes in."""
    model = jt.from_functions(
        lambda key: {"first": jax.random.normal(key, (8, 8)), "head": jax.random.normal(key, (8, 4))},
        lambda params, x: x @ params["first"] @ params["head"],
    )
    random = np.random.default_rng(0)
    rows = random.normal(size=(16, 8)).astype(np.float32), random.integers(0, 4, 16)
    result = jt.fit(
        model,
        jt.classification(),
        optax.sgd(0.1),
        data=rows,
        steps=2,
        batch_size=8,
        policy="bf16_pure",
        trainable=lambda path: path == "head",
        mesh=jt.make_mesh(data=1, devices=jax.devices()[:1]),
        run_dir=tmp_path / "run",
        logging={"report": False, "tensorboard": False},
    )
    assert kinds(result.state.params) == {"first": {"float32"}, "head": {"bfloat16"}}
    opened = jt.open_run(tmp_path / "run", model=model).params
    assert kinds(opened) == {"first": {"bfloat16"}, "head": {"bfloat16"}}
    np.testing.assert_array_equal(opened["first"], result.state.params["first"].astype("bfloat16"))
