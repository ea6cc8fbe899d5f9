"""The moving average that is evaluated: its warm-up, its batch statistics, and steps that do not count."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config.model import MLPConfig
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.metrics.evaluation import Evaluator
from jaxtrain.models.model import Model
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.tasks import classification, regression
from jaxtrain.train.build import make_train_step

CENTERS = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


def rows(count: int = 32, seed: int = 0) -> dict[str, np.ndarray]:
    """Four well separated classes."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 4, count).astype(np.int32)
    return {"inputs": CENTERS[targets] + 0.1 * rng.normal(size=(count, 8)).astype(np.float32), "targets": targets}


def one_device() -> jax.sharding.Mesh:
    return make_mesh(devices=jax.devices()[:1])


def host(tree: Any) -> Any:
    return jax.tree.map(np.array, jax.device_get(tree))


def test_moving_average_of_parameters() -> None:
    """Its decay grows as (1 + t) / (10 + t): 0.1, 0.18, 0.25, 0.31 after 0 to 3 updates; skipped steps do not count."""
    decay = 0.24
    model = build_model(MLPConfig(hidden_dims=(16,)), input_shape=(8,), num_outputs=4)
    step = make_train_step(model, classification(), optax.sgd(0.1), mesh=one_device(), ema_decay=decay)
    state = step.init(0)
    expected, updates = host(state.params), 0
    for k in range(5):
        batch = rows(seed=k)
        batch["inputs"][0, 0] = np.nan if k == 1 else 0.0
        state, _ = step(state, batch)
        if k != 1:
            kept = min(decay, (1 + updates) / (10 + updates))
            expected = jax.tree.map(lambda e, p, kept=kept: kept * e + (1 - kept) * p, expected, host(state.params))
            updates += 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), host(state.ema), expected)
    chex.assert_trees_all_equal(host(state.evaluation_params), host(state.ema))


def test_the_moving_average_is_evaluated_with_the_average_of_the_statistics() -> None:
    """A model of one scale whose statistic is the mean of its outputs: the average of both fit each other alone."""

    def apply(params: Any, model_state: Any, inputs: Any, *, key: Any, train: bool) -> Any:
        outputs = inputs * params["scale"]
        if train:
            model_state = {"mean": jnp.mean(outputs), "calls": model_state["calls"] + 1}
        return outputs - model_state["mean"], model_state

    start = {"scale": jnp.ones(())}, {"mean": jnp.zeros(()), "calls": jnp.int32(0)}
    model = Model("centred", lambda key: start, apply)
    inputs = np.linspace(1, 3, 8, dtype=np.float32)[:, None]
    batch = {"inputs": inputs, "targets": 5 * inputs}
    step = make_train_step(model, regression(), optax.sgd(0.1), mesh=one_device(), ema_decay=0.5)
    state = step.init(0)
    scale, mean, broken = 1.0, 0.0, {**batch, "inputs": np.full_like(inputs, np.nan)}
    for updates in range(4):
        before = float(state.params["scale"])
        state, _ = step(state, batch)
        kept = min(0.5, (1 + updates) / (10 + updates))
        scale = kept * scale + (1 - kept) * float(state.params["scale"])
        mean = kept * mean + (1 - kept) * 2 * before  # the outputs of a step are those of the parameters before it
        state, _ = step(state, broken)
    assert float(state.ema["scale"]) == pytest.approx(scale, rel=1e-5)
    assert float(state.evaluation_model_state["mean"]) == pytest.approx(mean, rel=1e-5)
    assert float(state.model_state["mean"]) != pytest.approx(mean, rel=1e-2)
    # What is no float has no average: it is as the last finite step left it.
    assert (int(state.evaluation_model_state["calls"]), state.ema_model_state["calls"]) == (4, None)
    expected = np.mean(np.square(inputs * scale - mean - 5 * inputs))
    assert Evaluator(step)(state, [batch])["eval_loss"] == pytest.approx(expected, rel=1e-5)
    raw = dataclasses.replace(state, ema=None)
    assert raw.evaluation_model_state is raw.model_state
