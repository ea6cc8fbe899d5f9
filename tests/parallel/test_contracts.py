"""Program contracts: what the compiled step of a layout communicates, and where, read from the program itself."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import pytest
from layouts import CASES, LAYOUTS, layout, load_batches, make_step, with_optimizer
from program_text import Transfer, crosses, transfers, unordered

from jaxtrain.parallel import programs

LAYERS, WIDTH, VOCABULARY, LENGTH, BATCH = 8, 32, 256, 32, 32
# A gradient of any matrix of the model is larger; losses, norms and counts are smaller.
SMALL = 64


# Layouts with stages, and the model whose programs are read.
STAGES = {
    "pipe=4,interleaved,data=2,zero=2": "transformer",
    "pipe=2,context=2,tensor=2": "transformer",
    "pipe=2,expert=2,data=2": "experts",
}


def long_but(*plain: str, rows: Iterable[str]) -> list[Any]:
    """Rows of which plain pytest runs those named."""
    return [pytest.param(row, marks=() if row in plain else pytest.mark.long) for row in rows]


@dataclass(frozen=True)
class Program:
    """What the compiled step of a layout communicates, its parameters, and the bytes of its temporaries."""

    collectives: list[programs.Collective]
    mesh: jax.sharding.Mesh
    params: Any
    temporary_bytes: int
    sent: list[Transfer]
    unordered: list[tuple[str, str]]


@functools.cache
def program(name: str, row: str, accumulation: int) -> Program:
    step = make_step(CASES[name], LAYOUTS[row], accumulation, "full")
    compiled = step.compile(load_batches(name)[0])
    text = compiled.as_text() or ""
    temporary = compiled.memory_analysis().temp_size_in_bytes
    found, sent, pairs = programs.collectives(text), transfers(text), unordered(text)
    return Program(found, step.mesh, step.abstract_state.params, temporary, sent, pairs)


def sizes_of(params: Any) -> tuple[int, int]:
    """Parameters outside the stack, and in it."""
    size = {name: sum(leaf.size for leaf in jax.tree.leaves(tree)) for name, tree in params.items()}
    return sum(size.values()) - size["blocks"], size["blocks"]


def compiled(name: str, row: str, accumulation: int) -> tuple[list[programs.Collective], jax.sharding.Mesh]:
    one = program(name, row, accumulation)
    return one.collectives, one.mesh


@pytest.mark.parametrize("row", long_but("zero=1", rows=["zero=1", "pipe=2,data=2,tensor=2,zero=1"]))
def test_gradients_cross_data_once_a_step_after_the_loop(row: str) -> None:
    found, mesh = compiled("transformer", row, 4)
    over_data = [c for c in found if crosses(c, mesh, "data")]
    assert not [c.line for c in over_data if c.in_loop], "something crosses data in the loop over microbatches"
    reduced = [size for c in over_data if c.kind in ("all-reduce", "reduce-scatter") for size in c.sizes if size > 1]
    # Each parameter's gradient once; the sums of the loss and of the norm are single numbers.
    assert len(reduced) == len(jax.tree.leaves(program("transformer", row, 4).params))


@pytest.mark.parametrize("row", ["zero=1", "zero=2"])
def test_zero_sends_each_parameter_twice(row: str) -> None:
    """The paper's volume: a reduce-scatter and an all-gather of P elements, of which a ring sends (N - 1) / N each.

    Stage 2 scatters every layer of every microbatch, in loops: the program has one operation for all layers.
    """
    one = program("transformer", row, 4)
    outside, stacked = sizes_of(one.params)
    whole, once = outside + stacked, outside + stacked // LAYERS
    over_data = [c for c in one.collectives if crosses(c, one.mesh, "data")]
    sizes = {kind: sum(sum(c.sizes) for c in over_data if c.kind == kind) for kind in programs.KINDS}
    devices = one.mesh.shape["data"]
    assert sizes.pop("reduce-scatter") == (whole if row == "zero=1" else once) // devices
    assert sizes.pop("all-gather") == whole
    # The norm, the sum of the losses and their weights.
    assert sum(sizes.values()) < SMALL
    assert not [c.line for c in over_data if c.kind == "all-gather" and c.in_loop]


@pytest.mark.parametrize("row", long_but("tensor=4,data=2", rows=["tensor=4,data=2", "tensor=2,fsdp=2,data=2"]))
def test_logits_are_never_gathered(row: str) -> None:
    found, mesh = compiled("transformer", row, 1)
    local_rows = BATCH * LENGTH // (mesh.shape["data"] * mesh.shape["fsdp"])
    gathered = [c for c in found if c.kind in ("all-gather", "all-to-all") and crosses(c, mesh, "tensor")]
    assert not [c.line for c in gathered if c.size >= local_rows * VOCABULARY // mesh.shape["tensor"]]


@pytest.mark.long
@pytest.mark.parametrize("row", STAGES)
def test_nothing_is_permuted_in_a_branch(row: str) -> None:
    """A collective-permute waits for every device, and stages take different branches."""
    found, _ = compiled(STAGES[row], row, 4)
    permutes = [c for c in found if c.kind == "collective-permute"]
    assert permutes, "a pipeline without any would pass nothing on"
    assert not [c.line for c in permutes if c.in_branch]
    assert [c for c in found if c.in_branch], "no collective in a branch: the reader of programs sees no branches"


@pytest.mark.long
def test_blocks_are_gathered_one_layer_at_a_time() -> None:
    """ZeRO-3: no all-gather in the compiled step makes a stacked parameter of all layers whole."""
    found, mesh = compiled("transformer", "fsdp=8", 4)
    stacked = {leaf.size for leaf in jax.tree.leaves(program("transformer", "fsdp=8", 4).params["blocks"])}
    sizes = {c.size for c in found if c.kind == "all-gather" and crosses(c, mesh, "fsdp")}
    assert sizes & {size // LAYERS for size in stacked}, "no layer is gathered"
    matrices = {size for size in stacked if size >= LAYERS * WIDTH * WIDTH // 2}
    whole = [c.line for c in found if c.kind == "all-gather" and c.size in matrices and f"[{LAYERS}," in c.result]
    assert not whole, "a parameter is gathered for all layers at once"


def test_stage_3_sends_each_parameter_three_times() -> None:
    """The paper's volume: per microbatch two gathers of P elements and one sum of P gradients, in float32 here.

    What stands outside the stack is gathered once a step, before the loop over microbatches, so that all stays within
    3 P. This compiler has no reduce-scatter but for what is written as one: its sums are all-reduces and slices.
    """
    count = 4
    one = program("transformer", "fsdp=8", count)
    outside, stacked = sizes_of(one.params)
    elements = {kind: sum(t.step_bytes for t in one.sent if t.kind == kind) / 4 for kind in programs.KINDS}
    assert elements["all-gather"] == 2 * count * stacked + outside
    # An all-reduce counts as a reduce-scatter and an all-gather.
    summed = elements["reduce-scatter"] + elements["all-reduce"] / 2
    assert 0 <= summed - count * (outside + stacked) < SMALL
    assert elements["all-gather"] + summed - SMALL < 3 * count * (outside + stacked)
    assert not any(elements[kind] for kind in programs.KINDS[3:])


@pytest.mark.long
@pytest.mark.parametrize("row", ["zero=2", "context=4,ring,data=2", *STAGES])
def test_exchanges_wait_for_those_in_loops_and_branches(row: str) -> None:
    """On CPU devices they could meet one another's partners."""
    assert not program(STAGES.get(row, "transformer"), row, 4).unordered


STATE = {
    "zero=1": (layout(data=8, zero=1), 8, 8),
    "zero=2": (layout(data=8, zero=2), 8, 8),
    "fsdp=8": (layout(fsdp=8), 8, 8),
    "data=2,fsdp=4,zero=1": (layout(data=2, fsdp=4, zero=1), 8, 8),
    "pipe=4,data=2": (layout(pipe=4, data=2), 4, 4),
    "pipe=2,fsdp=2,data=2,zero=1": (layout(pipe=2, fsdp=2, data=2, zero=1), 8, 8),
}


# Of every kind of state one: two moments, factors, matrices apart from the rest.
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_state_bytes_follow_the_formulas(optimizer: str) -> None:
    """Parameters, optimizer state and moving average divided by their degrees, within 5 %."""
    for row, (where, stored, updated) in STATE.items():
        state = make_step(with_optimizer(optimizer), where, 4, ema_decay=0.9).abstract_state
        for tree, parts in ((state.params, stored), (state.optimizer_state, updated), (state.ema, updated)):
            leaves = jax.tree.leaves(tree)
            whole = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
            local = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
            assert whole / parts <= local <= whole / parts * 1.05, row


def test_the_gradient_of_a_microbatch_is_no_array_beside_the_sum() -> None:
    """Of ZeRO-1 in float32: the sums, a copy of the parameters, and activations of this small model, 11.3 P bytes.

    With the gradient of a stack as an array of its own, which is added to the sum afterwards, they were 14.4 P.
    """
    one = program("transformer", "zero=1", 4)
    assert one.temporary_bytes <= 12.8 * sum(sizes_of(one.params))


def test_accumulated_gradients_are_parts_under_zero_2() -> None:
    """The compiled step of ZeRO-2 needs less memory than that of ZeRO-1 by most of a whole gradient."""
    one, two = (program("transformer", row, 4) for row in ("zero=1", "zero=2"))
    gradient = sum(leaf.size * 4 for leaf in jax.tree.leaves(one.params))
    assert one.temporary_bytes - two.temporary_bytes > 0.5 * gradient
