"""Checkpoints move between any two layouts: stages, ZeRO stages and expert shards included, optimizer state too."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from layouts import LAYOUTS, ONE, Layout, layout, make_step, with_optimizer

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.train.step import TrainStep

# before, after, model, optimizer
MOVES: dict[str, tuple[Layout, Layout, str, str]] = {
    "interleaved stages of zero 2 to fsdp": (
        LAYOUTS["pipe=4,interleaved,data=2,zero=2"],
        LAYOUTS["fsdp=8"],
        "transformer",
        "adamw",
    ),
    "zero 1 to stages x tensor": (LAYOUTS["zero=1"], LAYOUTS["pipe=2,fsdp=2,tensor=2"], "transformer", "lion"),
    "stages to zero 2, factored": (layout(pipe=4), layout(data=4, fsdp=2, zero=2), "transformer", "adafactor"),
    "experts to one device, int8": (LAYOUTS["expert=4,data=2"], ONE, "experts", "adamw int8"),
    "one device to experts x tensor": (ONE, LAYOUTS["expert=2,tensor=2,fsdp=2"], "experts", "muon"),
}


def check_moved(state: Any, source: TrainStep, target: TrainStep, folder: Path) -> None:
    """Saves a state and restores it on another layout and back, bit for bit."""
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(2, state, metadata={})
        moved = checkpointer.restore(target.abstract_state)
        checkpointer.save(3, moved, metadata={})
        returned = checkpointer.restore(source.abstract_state)
    for there, abstract in ((moved, target.abstract_state), (returned, source.abstract_state)):
        for kept, found, wanted in zip(
            jax.tree.leaves((state.params, state.optimizer_state)),
            jax.tree.leaves((there.params, there.optimizer_state)),
            jax.tree.leaves((abstract.params, abstract.optimizer_state)),
            strict=True,
        ):
            np.testing.assert_array_equal(jax.device_get(found), jax.device_get(kept))
            assert found.sharding.is_equivalent_to(wanted.sharding, found.ndim)


@pytest.mark.parametrize("row", MOVES)
def test_every_array_is_the_same(row: str, tmp_path: Path) -> None:
    before, after, name, optimizer = MOVES[row]
    source, target = (make_step(with_optimizer(optimizer, name), where, 4) for where in (before, after))
    random = np.random.default_rng(0)

    def fill(leaf: Any) -> Any:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(0), leaf.sharding)
        return jax.device_put(random.integers(0, 100, leaf.shape).astype(leaf.dtype), leaf.sharding)

    check_moved(jax.tree.map(fill, source.abstract_state), source, target, tmp_path)
