"""The loss in blocks on meshes: the numbers of whole logits on one device, and what its program may not hold."""

import dataclasses
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from layouts import CASES, ONE, TRANSFORMERS, Layout, load_batches, make_step

from jaxtrain.models.tasks import language_modeling
from jaxtrain.ops.loss.blocks import Logits
from jaxtrain.parallel import programs
from jaxtrain.train.step import TrainStep

VOCABULARY, ROWS, LENGTH = 256, 32, 32


@dataclass(frozen=True)
class Row:
    """A model on a mesh, and a cut whose blocks do not divide what a device has."""

    name: str
    mesh: str
    accumulation: int
    by: Logits
    block: int
    policy: str = "fp32"
    # Sums in another order: 2^-24 a sum, a few thousand of them.
    tolerance: float = 2e-6


CUTS = {
    "spread sequence and vocabulary, tied": Row("gpt2", "context=2,tensor=2,fsdp=2", 1, "vocabulary", 48),
    # A product has 11 bits: half of 2^-10 a rounding, and a norm over all gradients.
    "last stage, fp16": Row("transformer", "pipe=2,fsdp=2,tensor=2", 4, "vocabulary", 20, "fp16", 2.0**-11),
}


def numbers(row: Row, where: Layout, *, by: Logits, block: int | None) -> tuple[np.ndarray, TrainStep, str]:
    """Loss, z-loss and gradient norm of two steps with tokens of different weight."""
    case = dataclasses.replace(CASES[row.name], task=language_modeling(z_loss=1e-3, logits=by, block=block))
    step = make_step(case, where, row.accumulation, "full", row.policy)
    batches = [dict(batch) for batch in load_batches(row.name)[:2]]
    for batch in batches:
        batch["weights"] = np.random.default_rng(0).integers(0, 3, batch["targets"].shape).astype(np.float32)
    text = step.compile(batches[0]).as_text() or ""
    state, found = step.init(0), []
    for batch in batches:
        state, metrics = step(state, batch)
        found += [metrics["loss"], metrics["z_loss"], metrics["grad_norm"]]
    return np.array(jax.device_get(found), np.float64), step, text


@pytest.mark.long
@pytest.mark.parametrize("name", CUTS)
def test_blocks_on_a_mesh_give_the_numbers_of_one_device(name: str) -> None:
    row = CUTS[name]
    found, step, text = numbers(row, TRANSFORMERS[row.mesh], by=row.by, block=row.block)
    whole, *_ = numbers(row, ONE, by="whole", block=None)
    np.testing.assert_allclose(found, whole, rtol=row.tolerance)
    collectives, mesh = programs.collectives(text), step.mesh
    tokens = ROWS * LENGTH // (row.accumulation * mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["context"])
    logits = [c for c in collectives if c.size >= tokens * VOCABULARY // mesh.shape["tensor"]]
    assert not [
        c.line for c in logits if c.kind in ("all-gather", "all-to-all") and programs.crosses(c, mesh, "tensor")
    ]
    assert not [c.line for c in collectives if c.kind == "collective-permute" and c.in_branch]
