"""Checkpoints move between any two layouts: stages, ZeRO stages and expert shards included, optimizer state too."""

from pathlib import Path

import jax
import numpy as np
import pytest
from layouts import CASES, Layout, layout, load_batches, make_step, with_optimizer

from jaxtrain.checkpoint import Checkpointer

ONE = layout(data=1)
# before, after, model, optimizer
MOVES: dict[str, tuple[Layout, Layout, str, str]] = {
    "interleaved stages of zero 2 to fsdp": (
        layout(pipe=4, data=2, schedule="interleaved_1f1b", zero=2),
        layout(fsdp=8),
        "transformer",
        "adamw",
    ),
    "zero 1 to stages x tensor": (layout(data=8, zero=1), layout(pipe=2, fsdp=2, tensor=2), "transformer", "adamw"),
    "stages to zero 2, factored": (layout(pipe=4), layout(data=4, fsdp=2, zero=2), "transformer", "adafactor"),
    "experts to one device, int8": (layout(expert=4, data=2), ONE, "experts", "adamw int8"),
    "one device to experts x tensor": (ONE, layout(expert=2, tensor=2, fsdp=2), "experts", "muon"),
    "experts to stages of experts": (
        layout(expert=4, data=2),
        layout(pipe=2, expert=2, data=2),
        "experts",
        "adamw",
    ),
}
# Both of its steps are those of rows of test_layouts.py that plain pytest runs.
PLAIN = "interleaved stages of zero 2 to fsdp"


@pytest.mark.parametrize("row", [PLAIN, *(pytest.param(row, marks=pytest.mark.long) for row in MOVES if row != PLAIN)])
def test_state_and_next_losses_are_the_same(row: str, tmp_path: Path) -> None:
    """Every array bit for bit; the losses after the move are those of staying, within rounding (see test_layouts)."""
    before, after, name, optimizer = MOVES[row]
    case = CASES[name] if optimizer == "adamw" else with_optimizer(optimizer, name)
    batches = load_batches(name)
    # With remat, which changes no number, they are steps that the tests of layouts and of contracts compile too; those
    # of other optimizers have no neighbour, and compile faster without.
    remat = "full" if optimizer == "adamw" else "none"
    source, target = (make_step(case, where, 4, remat) for where in (before, after))
    state = source.init(0)
    for batch in batches[:2]:
        state, _ = source(state, batch)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, state, metadata={})
        moved = checkpointer.restore(target.abstract_state)
        # And back, which compiles nothing.
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
    for batch in batches[2:5]:
        state, stayed = source(state, batch)
        moved, went = target(moved, batch)
        np.testing.assert_allclose(went["loss"], stayed["loss"], rtol=1e-5)
