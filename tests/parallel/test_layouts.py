"""Layout equality: every mesh gives the losses and parameters of one device."""

from collections.abc import Iterable
from typing import Any

import chex
import numpy as np
import pytest
from layouts import EVERY_MODEL, EXPERTS, PLAIN, TRANSFORMERS, WITHOUT_REMAT, Layout, distance, reference, run

# fp32 sums in another order differ in the last bits: 2^-24 = 6e-8 a sum, measured 3e-7 on losses after 20 steps.
LOSS_TOLERANCE = 1e-5
# Of the norm over all parameters. Adam divides by the root of the second moment, so that elements whose gradient is
# mostly cancellation differ by up to 1e-3 of a step; measured 3e-6 after 20 steps.
PARAMETER_TOLERANCE = 1e-5


# Compiling an initialisation takes as long as compiling a step, so that some layouts prove theirs and the others start
# from the reference's state. Between them these rows spread parameters over every axis.
OWN_INIT = ("fsdp=8", "tensor=2,fsdp=2,data=2", "pipe=4,interleaved,data=2,zero=2", "expert=2,tensor=2,fsdp=2")


def with_remat(rows: Iterable[str]) -> list[Any]:
    """Every row with all of remat, some without it too; long but for the rows with it that plain pytest runs."""
    return [
        pytest.param(row, remat, marks=() if remat == "full" and row in PLAIN else pytest.mark.long)
        for row in rows
        for remat in ("none", "full")
        if remat == "full" or row in WITHOUT_REMAT
    ]


def check(name: str, row: str, where: Layout, accumulation: int, remat: str = "none") -> None:
    """Remat changes no number, so that the reference is without it."""
    alone = reference(name, accumulation)
    start = None if remat == "full" and row in OWN_INIT else alone.state
    outcome = run(name, where, accumulation, remat, start=start)
    chex.assert_trees_all_equal(outcome.state.params, alone.state.params)
    np.testing.assert_allclose(outcome.losses, alone.losses, rtol=LOSS_TOLERANCE)
    assert distance(outcome.params, alone.params) < PARAMETER_TOLERANCE
    assert distance(outcome.model_state, alone.model_state) < PARAMETER_TOLERANCE
    assert alone.losses[-3:].mean() < alone.losses[:3].mean(), "a run that learns nothing would prove nothing"


@pytest.mark.parametrize(("row", "remat"), with_remat(TRANSFORMERS))
def test_transformer(row: str, remat: str) -> None:
    check("transformer", row, TRANSFORMERS[row], 4, remat)


@pytest.mark.long
@pytest.mark.parametrize("row", ["tensor=2,fsdp=2,data=2", "context=2,tensor=2,fsdp=2"])
def test_transformer_in_one_go(row: str) -> None:
    """Without accumulation the step has no manual region over `data`."""
    check("transformer", row, TRANSFORMERS[row], 1, "dots")


@pytest.mark.long
def test_transformer_in_segments() -> None:
    """Sqrt remat of a stage's four layers, gathered from fsdp a layer at a time in every forward pass."""
    check("transformer", "pipe=2,fsdp=2,tensor=2", TRANSFORMERS["pipe=2,fsdp=2,tensor=2"], 4, "sqrt")


@pytest.mark.parametrize(("row", "remat"), with_remat(EXPERTS))
def test_experts(row: str, remat: str) -> None:
    check("experts", row, EXPERTS[row], 4, remat)


@pytest.mark.long
@pytest.mark.parametrize("row", ["data=8", "pipe=2,context=2,tensor=2"])
def test_gpt2_with_dropout(row: str) -> None:
    check("gpt2", row, TRANSFORMERS[row], 4, "dots")


# A ResNet's statistics meet `data`, a state in parts and channels in parts; what else rows differ in an MLP has too.
RESNET = [("data=8", 4), ("zero=2", 4), ("tensor=2,fsdp=2,data=2", 4), ("data=2,fsdp=4", 1)]
OTHERS = [("resnet", *row) for row in RESNET] + [("mlp", row, 4) for row in EVERY_MODEL] + [("mlp", "data=2,fsdp=4", 1)]


@pytest.mark.parametrize(("name", "row", "accumulation"), OTHERS)
@pytest.mark.long
def test_every_model(name: str, row: str, accumulation: int) -> None:
    check(name, row, EVERY_MODEL[row], accumulation)


@pytest.mark.long
@pytest.mark.parametrize("row", ["pipe=2,data=2,tensor=2,zero=1", "context=4,ring"])
def test_bf16(row: str) -> None:
    """Within the rounding of bf16.

    A product has 8 bits, an error of 2^-9 at most. A sum over shards rounds partial sums that one device does not,
    about one rounding in each of 2 x 8 residual branches; they add up like a random walk, 4 x 2^-9 = 8e-3 of a logit.
    Logits of this model are of the order of 1 and errors of tokens have no common sign, so that the mean over
    1,024 tokens moves by far less than that. Measured 1e-4; the bound is half a rounding.
    """
    alone = reference("transformer", 4, "bf16")
    outcome = run("transformer", TRANSFORMERS[row], 4, policy="bf16", start=alone.state)
    np.testing.assert_allclose(outcome.losses, alone.losses, rtol=2.0**-10)


@pytest.mark.parametrize("name", [pytest.param("transformer", marks=pytest.mark.long), "mlp"])
def test_accumulation_gives_the_numbers_of_the_whole_batch(name: str) -> None:
    """Without statistics over the batch, four microbatches are one batch; a ResNet's statistics are per microbatch."""
    whole, split = reference(name, 1), reference(name, 4)
    np.testing.assert_allclose(split.losses, whole.losses, rtol=LOSS_TOLERANCE)
    assert distance(split.params, whole.params) < PARAMETER_TOLERANCE
