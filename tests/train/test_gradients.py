"""The gradients of a step and their norm: those of a plain function."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.train.update import gradient_norm

BATCH = {
    "inputs": np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32),
    "targets": (np.arange(32) % 4).astype(np.int32),
    # Microbatches of unequal weight, and one of none.
    "weights": np.array([0, 1, 2, 3] * 7 + [0, 0, 1, 0], np.float32),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "4 microbatches": dict(accumulation_steps=4),
    "fp16 with a loss scale, head frozen": dict(policy="fp16", trainable=lambda path: path == "first"),
}


def init(key: jax.Array) -> dict[str, Any]:
    a, b = jax.random.split(key)
    return {"first": 0.3 * jax.random.normal(a, (8, 16)), "head": 0.3 * jax.random.normal(b, (16, 4))}


def apply(params: Any, inputs: jax.Array) -> jax.Array:
    return jnp.tanh(inputs @ params["first"]) @ params["head"]


def mean_loss(params: Any) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(apply(params, BATCH["inputs"]), BATCH["targets"])
    return jnp.sum(losses * BATCH["weights"]) / jnp.sum(BATCH["weights"])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.long if "fp16" in name else ())
        for name, options in OPTIONS.items()
    ],
)
def test_gradients_are_those_of_the_mean_loss(options: dict[str, Any]) -> None:
    mesh = jt.make_mesh(data=2, fsdp=4)
    step = jt.make_train_step(jt.from_functions(init, apply), jt.classification(), optax.sgd(1.0), mesh=mesh, **options)
    state = step.init(0)
    before = jax.tree.map(np.array, state.params)
    # float32 sums in another order; fp16 rounds activations and gradients to 11 bits.
    tolerance = 3e-3 if options.get("policy") == "fp16" else 2e-6
    loss, expected = jax.value_and_grad(mean_loss)(before)
    state, metrics = step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=tolerance)
    found = {name: before[name] - np.array(leaf) for name, leaf in state.params.items()}
    if "trainable" in options:
        np.testing.assert_array_equal(found.pop("head"), 0)
    for name, moved in found.items():
        gradient = expected[name]
        np.testing.assert_allclose(moved, gradient, atol=tolerance * np.abs(gradient).max(), err_msg=name)
    norm = np.sqrt(sum(np.sum(np.square(moved)) for moved in found.values()))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, 3, 128, 64), (257, 255), (7,)], ids=["slices", "does not divide", "small"])
def test_slices_give_the_norm(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    tree = {"a": values, "frozen": None, "b": np.full((7,), 3 + 4j, np.complex64)}  # which count by their magnitude
    found, expected = jax.jit(lambda tree: (gradient_norm(tree, sliced=True), optax.tree.norm(tree)))(tree)
    # float32 sums of 73,728 squares, in another order.
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(found, np.sqrt(np.sum(values.astype(np.float64) ** 2) + 7 * 25), rtol=1e-5)
