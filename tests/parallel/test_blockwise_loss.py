"""The loss in blocks on meshes: the numbers of whole logits on one device, and what its program may not hold."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from layouts import CASES, LAYOUTS, ONE, Layout, load_batches, make_step
from program_text import crosses

import jaxtrain as jt
from jaxtrain.models.tasks import language_modeling
from jaxtrain.ops.loss.blocks import Logits
from jaxtrain.parallel import programs
from jaxtrain.train.step import TrainStep

VOCABULARY, ROWS, LENGTH = 256, 32, 32


def numbers(where: Layout, *, by: Logits, block: int | None) -> tuple[np.ndarray, TrainStep, str]:
    """Loss, z-loss and gradient norm of two steps with tokens of different weight."""
    case = dataclasses.replace(CASES["transformer"], task=language_modeling(z_loss=1e-3, logits=by, block=block))
    step = make_step(case, where, 4, "full", "fp16")
    batches = [dict(batch) for batch in load_batches("transformer")[:2]]
    for batch in batches:
        batch["weights"] = np.random.default_rng(0).integers(0, 3, batch["targets"].shape).astype(np.float32)
    text = step.compile(batches[0]).as_text() or ""
    state, found = step.init(0), []
    for batch in batches:
        state, metrics = step(state, batch)
        found += [metrics["loss"], metrics["z_loss"], metrics["grad_norm"]]
    return np.array(jax.device_get(found), np.float64), step, text


@pytest.mark.long
def test_blocks_on_the_last_stage_give_the_numbers_of_one_device() -> None:
    found, step, text = numbers(LAYOUTS["pipe=2,fsdp=2,tensor=2"], by="vocabulary", block=20)
    # A product has 11 bits: half of 2^-10 a rounding, and a norm over all gradients.
    np.testing.assert_allclose(found, numbers(ONE, by="whole", block=None)[0], rtol=2.0**-11)
    collectives, mesh = programs.collectives(text), step.mesh
    logits = [c for c in collectives if c.size >= ROWS * LENGTH // 8 * VOCABULARY // mesh.shape["tensor"]]
    assert not [c.line for c in logits if c.kind in ("all-gather", "all-to-all") and crosses(c, mesh, "tensor")]
    assert not [c.line for c in collectives if c.kind == "collective-permute" and c.in_branch]


# Degrees, microbatches, how logits are partitioned, and whether the kernel is a table.
BIASED: dict[str, tuple[dict[str, int], int, Logits, bool]] = {
    "tensor and data, accumulation, vocabulary": ({"data": 2, "tensor": 2}, 2, "vocabulary", False),
    "tensor, context and fsdp, tokens, tied": ({"context": 2, "tensor": 2, "fsdp": 2}, 1, "tokens", True),
}


def biased(tied: bool) -> jt.Model:
    """One layer from tokens to capped logits with a bias; no parameter is zero."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        shapes = {"table": (48, 64), "kernel": (48, 64) if tied else (64, 48), "bias": (48,)}
        keys = dict(zip(shapes, jax.random.split(key, 3), strict=True))
        return {name: jax.random.normal(keys[name], dims) for name, dims in shapes.items()}

    def apply(params: dict[str, jax.Array], tokens: jax.Array) -> jt.DeferredLogits:
        hidden = 0.2 * params["table"][tokens]  # some logits reach the cap, most do not
        return jt.DeferredLogits(hidden, params["kernel"], tied=tied, bias=params["bias"], softcap=3.0)

    kernel = ("vocab", "embed") if tied else ("embed", "vocab")
    return jt.from_functions(init, apply, axes={"table": (None, "embed"), "kernel": kernel, "bias": ("vocab",)})


@pytest.mark.long
@pytest.mark.parametrize("name", BIASED)
def test_bias_and_softcap_on_a_mesh_move_parameters_as_on_one_device(name: str) -> None:
    degrees, accumulation, by, tied = BIASED[name]
    rng = np.random.default_rng(0)
    batch: dict[str, np.ndarray] = {key: rng.integers(0, 48, (8, 8), np.int32) for key in ("inputs", "targets")}
    batch["weights"] = rng.integers(0, 3, (8, 8)).astype(np.float32)

    def moved(task: jt.Task, accumulation: int, degrees: dict[str, int]) -> tuple[float, dict[str, np.ndarray]]:
        devices = jax.devices()[: int(np.prod([*degrees.values(), 1]))]
        mesh = jt.make_mesh(**degrees, devices=devices)
        step = jt.make_train_step(biased(tied), task, optax.sgd(1.0), mesh=mesh, accumulation_steps=accumulation)
        state, metrics = step(step.init(0), batch)
        return float(metrics["loss"]), jax.device_get(state.params)

    task = language_modeling(z_loss=1e-2, logits=by, block=None if by == "whole" else 10)
    loss, params = moved(task, accumulation, degrees)
    wanted_loss, wanted = moved(language_modeling(z_loss=1e-2, logits="whole"), 1, {})
    # Sums of 64 tokens in another order: 2^-24 a sum.
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    for path, value in wanted.items():
        np.testing.assert_allclose(params[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("trained", [("table",), ("table", "bias")], ids="-".join)
def test_the_gradient_of_a_frozen_kernel_is_not_sent(trained: tuple[str, ...]) -> None:
    mesh = jt.make_mesh(data=4, devices=jax.devices()[:4])
    task = language_modeling(logits="vocabulary", block=10)
    step = jt.make_train_step(biased(tied=False), task, optax.sgd(1.0), mesh=mesh, trainable=trained.__contains__)
    shapes = {name: jax.ShapeDtypeStruct((8, 8), np.int32) for name in ("inputs", "targets")}
    found = programs.collectives(step.compile(shapes).as_text() or "")
    # The gradient of the table alone.
    assert len([size for c in found if c.kind == "all-reduce" for size in c.sizes if size >= 64 * 10]) == 1
