"""Lowering, compiling and running: what a step remembers of each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.runtime.compiler import note_choice


def rows(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(count)
    return {
        "inputs": rng.normal(size=(count, 8)).astype(np.float32),
        "targets": (np.arange(count) % 4).astype(np.int32),
    }


def make() -> jt.TrainStep:
    def apply(params: Any, x: jax.Array) -> jax.Array:
        note_choice("rows", str(x.shape[0]), [])
        return jnp.tanh(x) @ params["kernel"]

    model = jt.from_functions(lambda key: {"kernel": jax.random.normal(key, (8, 4))}, apply)
    mesh = jt.make_mesh(data=2, devices=jax.devices()[:2])
    return jt.make_train_step(model, jt.classification(), optax.adam(0.1), mesh=mesh)


def losses(step: jt.TrainStep, batch: dict[str, np.ndarray]) -> list[float]:
    state, found = step.init(0), []
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


def test_lowering_changes_nothing_of_a_step() -> None:
    """Neither numbers nor choices nor what a wrong batch is refused with."""
    plain, lowered = make(), make()
    for step in (plain, lowered):
        step.compile(rows(8))
    for count in (16, 8, 32):
        lowered.lower(rows(count))
    assert losses(plain, rows(8)) == losses(lowered, rows(8))
    assert plain.choices == lowered.choices == ("rows: 8",)
    with pytest.raises(TypeError, match=r"compiled.*float32\[8,8\].*float32\[16,8\]"):
        lowered(lowered.init(0), rows(16))
