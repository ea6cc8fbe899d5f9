"""Training above quantized bases: the same on every mesh, and without their floats in memory."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt

SIZES: dict[str, Any] = {"kind": "transformer", "embed_dim": 64, "num_heads": 4, "mlp_dim": 128}
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 17))
BATCH = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


def make_step(
    base: str | None, *, layers: int = 2, remat: str = "none", degrees: dict[str, int] | None = None, **sizes: int
) -> jt.TrainStep:
    config = {**SIZES, **sizes, "num_layers": layers}
    model = jt.build_model(config, input_shape=(16,), vocab_size=64, remat=jt.Remat(remat))
    adapted = jt.adapt(model, lora=jt.LoraConfig(rank=8), base=base)
    mesh = jt.make_mesh(**degrees) if degrees else jt.make_mesh(devices=jax.devices()[:1])
    return jt.make_train_step(adapted, jt.language_modeling(), optax.adam(1e-2), mesh=mesh)


def losses(step: jt.TrainStep) -> np.ndarray:
    state, found = step.init(0), []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        found.append(float(metrics["loss"]))
    return np.array(found)


@functools.cache
def alone(base: str) -> np.ndarray:
    return losses(make_step(base))


LAYOUTS = [
    pytest.param("nf4", {"fsdp": 2, "tensor": 2}, "none", id="nf4: fsdp, tensor"),
    pytest.param("nf4", {"pipe": 2, "fsdp": 2, "tensor": 2}, "none", id="nf4: pipe, fsdp, tensor"),
    pytest.param("nf4", {"data": 2, "fsdp": 4}, "full", id="nf4: data, fsdp, full remat"),
    pytest.param("nf4", {"context": 2, "tensor": 4}, "dots", id="nf4: context, tensor, remat of dots"),
    pytest.param("int8", {"pipe": 2, "fsdp": 2, "tensor": 2}, "none", id="int8: pipe, fsdp, tensor"),
    pytest.param("int8", {"fsdp": 8}, "full", id="int8: fsdp, full remat"),
]


@pytest.mark.long
@pytest.mark.parametrize(("base", "degrees", "remat"), LAYOUTS)
def test_every_layout_equals_one_device(base, degrees, remat):
    """To 1e-5: float32, in other orders of sums; the integers are the same."""
    found = losses(make_step(base, degrees=degrees, remat=remat))
    np.testing.assert_allclose(found, alone(base), rtol=1e-5)
    assert np.abs(np.diff(alone(base))).min() > 1e-3, "a run that learns nothing would prove nothing"


REMATS = [pytest.param("nf4", "none", id="nf4"), pytest.param("int8", "none", id="int8", marks=pytest.mark.long)]
REMATS += [pytest.param("nf4", remat, id=f"nf4, {remat}", marks=pytest.mark.long) for remat in ("full", "dots")]


@pytest.mark.parametrize(("base", "remat"), REMATS)
def test_the_floats_of_a_base_are_never_kept(base, remat):
    """Of 12 layers the compiled step holds less than the floats of 6 beside what it is given, for a batch of a row."""
    layers = 12
    step = make_step(base, layers=layers, remat=remat, embed_dim=256, mlp_dim=1024)
    row = {name: values[:1] for name, values in BATCH.items()}
    compiled = step.compile(row)
    # Four kernels of attention and three of the MLP.
    floats = 4 * layers * (4 * 256**2 + 3 * 256 * 1024)
    assert compiled.memory_analysis().temp_size_in_bytes < floats / 2
