"""Layout equality of a model with adapters: every mesh gives the numbers of one device, and no mesh moves the base."""

from typing import Any

import chex
import jax
import numpy as np
import pytest
from layouts import TRANSFORMERS, distance, reference, run
from test_layouts import LOSS_TOLERANCE, PARAMETER_TOLERANCE

from jaxtrain.runtime.tree_path import path_name

PLAIN = ("fsdp=8",)
# What shards adapters, splits their stack or draws their masks; test_layouts.py proves all of TRANSFORMERS without.
ROWS = (
    "fsdp=8",
    "zero=2,data=2,fsdp=2,tensor=2",
    "tensor=2,fsdp=2,data=2,sequence-parallel",
    "pipe=4,interleaved,data=2,zero=2",
    "pipe=2,context=2,tensor=2",
    "context=4,all_to_all",
)
# Layouts whose initialisation is proved too; the others start from the reference's state.
OWN_INIT = ("zero=2,data=2,fsdp=2,tensor=2", "pipe=4,interleaved,data=2,zero=2")


def adapters(params: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {path_name(path): leaf for path, leaf in leaves if path_name(path).endswith(("lora_a", "lora_b"))}


def base(params: Any) -> dict[str, Any]:
    trained = adapters(params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {path_name(path): leaf for path, leaf in leaves if path_name(path) not in trained}


@pytest.mark.parametrize("row", [pytest.param(row, marks=() if row in PLAIN else pytest.mark.long) for row in ROWS])
def test_every_mesh_gives_the_numbers_of_one_device(row: str) -> None:
    alone = reference("adapters", 4)
    outcome = run("adapters", TRANSFORMERS[row], 4, "full", start=None if row in OWN_INIT else alone.state)
    chex.assert_trees_all_equal(outcome.state.params, alone.state.params)
    chex.assert_trees_all_equal(base(outcome.params), base(alone.state.params))
    np.testing.assert_allclose(outcome.losses, alone.losses, rtol=LOSS_TOLERANCE)
    assert distance(outcome.params, alone.params) < PARAMETER_TOLERANCE
    # The base, which is far larger, hides them above: measured 1e-5.
    assert distance(adapters(outcome.params), adapters(alone.params)) < 1e-4
    assert alone.losses[-3:].mean() < alone.losses[:3].mean(), "a run that learns nothing would prove nothing"
