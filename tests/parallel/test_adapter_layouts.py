"""Layout equality of a model with adapters: every mesh gives the numbers of one device, and no mesh moves the base."""

from typing import Any

import chex
import jax
import numpy as np
import pytest
from layouts import LAYOUTS, distance, reference, run
from test_layouts import LOSS_TOLERANCE, PARAMETER_TOLERANCE

from jaxtrain.runtime.tree import path_name

# Layouts that shard adapters, split their stack and draw their masks, and whether their initialisation is proved too.
ROWS = {"fsdp=8": False, "zero=2,data=2,fsdp=2,tensor=2": True, "pipe=2,context=2,tensor=2": False}


def split(params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The adapters and the base, by path."""
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    adapters = {path: leaf for path, leaf in leaves.items() if path.endswith(("lora_a", "lora_b"))}
    return adapters, {path: leaf for path, leaf in leaves.items() if path not in adapters}


@pytest.mark.parametrize("row", [pytest.param(row, marks=() if row == "fsdp=8" else pytest.mark.long) for row in ROWS])
def test_every_mesh_gives_the_numbers_of_one_device(row: str) -> None:
    alone = reference("adapters", 4)
    remat = "none" if row == "fsdp=8" else "full"
    outcome = run("adapters", LAYOUTS[row], 4, remat, start=None if ROWS[row] else alone.state)
    chex.assert_trees_all_equal(outcome.state.params, alone.state.params)
    (adapters, base), (expected, _) = split(outcome.params), split(alone.params)
    chex.assert_trees_all_equal(base, split(alone.state.params)[1])
    np.testing.assert_allclose(outcome.losses, alone.losses, rtol=LOSS_TOLERANCE)
    assert distance(outcome.params, alone.params) < PARAMETER_TOLERANCE
    # The base, which is far larger, hides them above: measured 1e-5.
    assert distance(adapters, expected) < 1e-4
    assert alone.losses[-2:].mean() < alone.losses[:2].mean(), "a run that learns nothing would prove nothing"
