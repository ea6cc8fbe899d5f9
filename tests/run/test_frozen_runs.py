"""Runs with `optimizer.freeze` in bf16_pure: frozen parameters in bf16, also where an earlier version saved float32."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import TINY, losses

import jaxtrain as jt
from jaxtrain.layout.sharding import path_name
from jaxtrain.models import sharded
from jaxtrain.precision.policy import cast_floats
from jaxtrain.train import program

FREEZE = {"precision.policy": "bf16_pure", "optimizer.freeze": ["blocks/*"]}


def train(run_dir: Path, steps: int) -> jt.Result:
    return jt.run_config(TINY, run_dir=run_dir, overrides={**FREEZE, "train.steps": steps})


def stored_as_they_came(model: Any, params: Any, policy: Any, trainable: Any) -> Any:
    """The rule of earlier versions: what is frozen keeps the dtype that it is drawn in."""

    def one(path: Any, leaf: Any) -> Any:
        return cast_floats(leaf, policy.param_dtype) if trainable(path_name(path)) else leaf

    return jax.tree_util.tree_map_with_path(one, params)


def dtypes(run_dir: Path) -> set[str]:
    with jt.Checkpointer(run_dir / "checkpoints", read_only=True) as checkpointer:
        info = checkpointer.info(checkpointer.steps()[-1])
    return {dtype for name, (_, dtype) in info.leaves.items() if name.startswith("params.blocks.")}


def test_a_run_that_saved_frozen_float32_goes_on_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model computes in bf16, so that the losses are those of a run that stored bf16 from the first step on."""
    whole, earlier = tmp_path / "whole", tmp_path / "earlier"
    train(whole, 4)
    assert dtypes(whole) == {"bfloat16"}
    with monkeypatch.context() as patch:
        for module in (sharded, program):
            patch.setattr(module, "stored_params", stored_as_they_came)
        train(earlier, 2)
    assert dtypes(earlier) == {"float32"}
    opened = jt.open_run(earlier).params["blocks"]
    assert {leaf.dtype for leaf in jax.tree.leaves(opened)} == {jnp.dtype(jnp.bfloat16)}
    train(earlier, 4)
    assert dtypes(earlier) == {"bfloat16"}
    assert losses(earlier) == losses(whole)
    frozen = [jt.open_run(folder).params["blocks"] for folder in (whole, earlier)]
    jax.tree.map(np.testing.assert_array_equal, *frozen)
