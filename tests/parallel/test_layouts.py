"""Layout equality: every mesh gives the losses, gradient norms and parameters of one device."""

from typing import Any

import chex
import jax
import numpy as np
import pytest
from layouts import LAYOUTS, distance, reference, run

from jaxtrain.runtime.tree import path_name

# fp32 sums in another order differ in the last bits: 2^-24 = 6e-8 a sum.
LOSS_TOLERANCE = 1e-5
# Of the norm over all parameters. Adam divides by the root of the second moment, so that elements whose gradient is
# mostly cancellation differ by up to 1e-3 of a step.
PARAMETER_TOLERANCE = 1e-5


# Model, layout, microbatches, remat. Those with remat "full" are programs that test_contracts.py reads too.
PLAIN = [
    ("transformer", "fsdp=8", 4, "full"),
    ("transformer", "pipe=4,interleaved,data=2,zero=2", 4, "full"),
    ("transformer", "context=4,all_to_all", 4, "full"),
    ("adapters", "fsdp=8", 4, "none"),
    ("mlp", "zero=1", 4, "none"),
    # Without accumulation the step has no manual region over `data`.
    ("mlp", "tensor=2,fsdp=2,data=2", 1, "none"),
]
LONG = [
    ("transformer", "zero=2,data=2,fsdp=2,tensor=2", 4, "full"),
    # Plain pytest proves the experts' own exchange by test_expert_rounds.py.
    ("experts", "expert=4,data=2", 4, "full"),
    ("transformer", "context=2,tensor=2,fsdp=2", 1, "dots"),
    ("transformer", "context=4,ring,data=2", 4, "none"),
    ("transformer", "tensor=2,fsdp=2,data=2,sequence-parallel", 4, "full"),
    ("transformer", "pipe=4,gpipe", 4, "none"),
    ("transformer", "pipe=2,data=2,tensor=2,zero=1", 4, "none"),
    # Segments of a stage's four layers, gathered from fsdp a layer at a time in every forward pass.
    ("transformer", "pipe=2,fsdp=2,tensor=2", 4, "sqrt"),
    ("experts", "expert=2,tensor=2,fsdp=2", 4, "full"),
    ("experts", "pipe=2,expert=2,tensor=2,interleaved", 4, "full"),
    ("gpt2", "pipe=2,context=2,tensor=2", 4, "dots"),
    # Adapters are sharded, their stack is split, and their masks are drawn.
    ("adapters", "zero=2,data=2,fsdp=2,tensor=2", 4, "full"),
    ("adapters", "pipe=2,context=2,tensor=2", 4, "full"),
    # Statistics meet `data`, a state in parts, and channels in parts.
    ("resnet", "zero=2", 4, "none"),
    ("resnet", "tensor=2,fsdp=2,data=2", 1, "none"),
]
# Compiling an initialisation takes as long as compiling a step, so that some layouts prove theirs and the others start
# from the reference's state. Between them these rows spread parameters over every axis.
OWN_INIT = (
    "fsdp=8",
    "tensor=2,fsdp=2,data=2,sequence-parallel",
    "pipe=4,interleaved,data=2,zero=2",
    "expert=2,tensor=2,fsdp=2",
)


def split(params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The adapters and the base, by path."""
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    adapters = {path: leaf for path, leaf in leaves.items() if path.endswith(("lora_a", "lora_b"))}
    return adapters, {path: leaf for path, leaf in leaves.items() if path not in adapters}


@pytest.mark.parametrize(
    ("name", "row", "accumulation", "remat"), [*PLAIN, *(pytest.param(*row, marks=pytest.mark.long) for row in LONG)]
)
def test_numbers_of_one_device(name: str, row: str, accumulation: int, remat: str) -> None:
    """Neither remat nor accumulation changes a number, but of a ResNet, whose statistics are per microbatch.

    Models with dropout are compared with a batch that is computed at once: their masks follow from the row.
    """
    alone = reference(name, {"resnet": accumulation, "adapters": 1, "gpt2": 1}.get(name, 4))
    outcome = run(name, LAYOUTS[row], accumulation, remat, start=None if row in OWN_INIT else alone.state)
    chex.assert_trees_all_equal(outcome.state.params, alone.state.params)
    np.testing.assert_allclose(outcome.losses, alone.losses, rtol=LOSS_TOLERANCE)
    np.testing.assert_allclose(outcome.grad_norms, alone.grad_norms, rtol=LOSS_TOLERANCE)
    assert distance(outcome.params, alone.params) < PARAMETER_TOLERANCE
    assert distance(outcome.model_state, alone.model_state) < PARAMETER_TOLERANCE
    if name == "adapters":
        (adapters, base), (expected, _) = split(outcome.params), split(alone.params)
        chex.assert_trees_all_equal(base, split(alone.state.params)[1])
        # The base, which is far larger, hides them above: measured 1e-5.
        assert distance(adapters, expected) < 1e-4
        assert alone.losses[-2:].mean() < alone.losses[:2].mean(), "a run that learns nothing would prove nothing"
        return
    moved = distance(alone.params, alone.state.params)
    assert moved > 100 * PARAMETER_TOLERANCE, "a run that moves nothing would prove nothing"


@pytest.mark.long
def test_bf16() -> None:
    """Within the rounding of bf16.

    A product has 8 bits, an error of 2^-9 at most. A sum over shards rounds partial sums that one device does not,
    about one rounding in each of 2 x 8 residual branches; they add up like a random walk, 4 x 2^-9 = 8e-3 of a logit.
    Logits of this model are of the order of 1 and errors of tokens have no common sign, so that the mean over
    1,024 tokens moves by far less than that. Measured 1e-4; the bound is half a rounding.
    """
    alone = reference("transformer", 4, "bf16")
    outcome = run("transformer", LAYOUTS["pipe=2,data=2,tensor=2,zero=1"], 4, policy="bf16", start=alone.state)
    np.testing.assert_allclose(outcome.losses, alone.losses, rtol=2.0**-10)
