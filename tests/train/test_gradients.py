"""`step.gradients` and their norm: those of a plain function."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.train.step import TrainStep
from jaxtrain.train.update import gradient_norm

BATCH = {
    "inputs": np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32),
    "targets": (np.arange(32) % 4).astype(np.int32),
    # Microbatches of unequal weight, and one of none.
    "weights": np.array([0, 1, 2, 3] * 7 + [0, 0, 1, 0], np.float32),
}
MESHES = {"one device": dict(data=1), "data=2,fsdp=4": dict(data=2, fsdp=4)}
OPTIONS: dict[str, dict[str, Any]] = {
    # Of clipping it knows nothing.
    "4 microbatches, clipped": dict(accumulation_steps=4, clip_norm=1e-3),
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


def make(mesh: str, optimizer: Any = None, *, model: jt.Model | None = None, **options: Any) -> TrainStep:
    sizes = MESHES[mesh]
    return jt.make_train_step(
        model or jt.from_functions(init, apply),
        jt.classification(),
        optimizer or optax.adam(1e-2),
        mesh=jt.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))]),
        **options,
    )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.long if "fp16" in name else ())
        for name, options in OPTIONS.items()
    ],
)
def test_gradients_are_those_of_the_mean_loss(options: dict[str, Any]) -> None:
    step = make("data=2,fsdp=4", **options)
    state = step.init(0)
    found = step.gradients(state, BATCH)
    # float32 sums in another order; fp16 rounds activations and gradients to 11 bits.
    tolerance = 3e-3 if options.get("policy") == "fp16" else 2e-6
    loss, expected = jax.value_and_grad(mean_loss)(jax.tree.map(np.array, state.params))
    np.testing.assert_allclose(found.loss, loss, rtol=tolerance)
    for name, gradient in expected.items():
        if "trainable" in options and name == "head":
            assert found.tree[name] is None
            continue
        np.testing.assert_allclose(found.tree[name], gradient, atol=tolerance * np.abs(gradient).max(), err_msg=name)
        assert found.tree[name].sharding == state.params[name].sharding
        assert found.tree[name].dtype == jnp.float32
    assert float(found.weight) == BATCH["weights"].sum()
    # Nothing was donated or moved: the state trains, and its step sees the same gradient.
    _, metrics = step(state, BATCH)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(found.tree), rtol=1e-6)
    np.testing.assert_array_equal(metrics["accuracy"], found.metrics["accuracy"])


@pytest.mark.parametrize("shape", [(3, 3, 128, 64), (257, 255), (7,)], ids=["slices", "does not divide", "small"])
def test_slices_give_the_norm(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    tree = {"a": values, "frozen": None, "b": np.full((7,), 3 + 4j, np.complex64)}  # which count by their magnitude
    found, expected = jax.jit(lambda tree: (gradient_norm(tree, sliced=True), optax.tree.norm(tree)))(tree)
    # float32 sums of 73,728 squares, in another order.
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(found, np.sqrt(np.sum(values.astype(np.float64) ** 2) + 7 * 25), rtol=1e-5)
