"""The router's loss of rows with prompts and padding: real tokens alone count, the same on every layout."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import COMPILER, ONE, Layout, distance, layout

from jaxtrain.layout.mesh import make_mesh
from jaxtrain.models.model import Model
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.tasks import language_modeling
from jaxtrain.train.make_step import make_train_step

LENGTH, VOCABULARY, ROWS, NUM_EXPERTS = 16, 24, 8, 4
WEIGHTS = dict(load_balance_weight=0.5, router_z_weight=0.0)
MODEL = dict(
    kind="transformer", num_layers=4, embed_dim=16, num_heads=4, mlp_dim=16, max_sequence_length=LENGTH,
    experts=dict(num_experts=NUM_EXPERTS, experts_per_token=1, **WEIGHTS),
)  # fmt: skip


def model(**options: Any) -> Model:
    return build_model({**MODEL, **options}, input_shape=(LENGTH,), vocab_size=VOCABULARY)


def batch(number: int) -> dict[str, Any]:
    """Rows of 3 to 16 real tokens, of which the first two are a prompt; shards and microbatches have unequal parts."""
    random = np.random.default_rng(number)
    tokens = random.integers(1, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    real = np.arange(LENGTH)[None] < np.array([16, 3, 5, 9, 3, 3, 12, 4])[:, None]
    trained = (real & (np.arange(LENGTH) >= 2)).astype(np.float32)
    inputs = {"tokens": np.where(real, tokens, 0), "segments": real.astype(np.int32)}
    return {"inputs": inputs, "targets": np.roll(tokens, -1, axis=1), "weights": trained}


def run(where: Layout, accumulation: int) -> tuple[np.ndarray, Any]:
    mesh = make_mesh(**{"data": 1, **where.degrees}, devices=jax.devices()[: math.prod(where.degrees.values())])
    step = make_train_step(
        model(),
        language_modeling(),
        optax.sgd(0.1),
        mesh=mesh,
        accumulation_steps=accumulation,
        parallelism=where.options,
        compiler_options=COMPILER,
    )
    state, found = step.init(0), []
    for number in range(2):
        state, metrics = step(state, batch(number))
        found.append([float(metrics[name]) for name in ("loss", "router_loss", "expert_busiest", "experts_unused")])
    return np.array(found), jax.device_get(state.params)


@functools.cache
def reference(accumulation: int) -> tuple[np.ndarray, Any]:
    return run(ONE, accumulation)


@pytest.mark.parametrize(
    ("where", "accumulation"),
    [
        pytest.param(layout(expert=2, data=2, zero=2), 2, id="expert-zero-2", marks=pytest.mark.long),
        pytest.param(layout(pipe=2, data=2), 2, id="pipe-data", marks=pytest.mark.long),
        pytest.param(layout(context=2, expert=2), 1, id="context-expert", marks=pytest.mark.long),
    ],
)
def test_numbers_of_one_device(where: Layout, accumulation: int) -> None:
    (found, params), (expected, expected_params) = run(where, accumulation), reference(accumulation)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert distance(params, expected_params) < 1e-5


def test_the_loss_is_that_of_the_rows_without_their_padding() -> None:
    """Of one layer: the balance term by hand, over real tokens (prompts too) and no others."""
    one = model(num_layers=1)
    params, _ = one.init(jax.random.key(0))
    task, rows = language_modeling(), batch(0)
    outputs, _ = jax.jit(lambda inputs: one.apply(params, {}, inputs, key=None, train=True))(rows["inputs"])
    _, weight, metrics = task.loss(outputs, rows)
    real = rows["inputs"]["segments"] != 0
    assert float(outputs["router_tokens"]) == real.sum() > rows["weights"].sum()
    found = float(metrics["router_loss"][0] / weight)
    np.testing.assert_allclose(found, np.sum(outputs["router_loss"]) / real.sum(), rtol=1e-6)
    # What stands at padding is nothing to it.
    other = {**rows["inputs"], "tokens": np.where(real, rows["inputs"]["tokens"], 7)}
    again, _ = jax.jit(lambda inputs: one.apply(params, {}, inputs, key=None, train=True))(other)
    np.testing.assert_allclose(jnp.sum(again["router_loss"]), jnp.sum(outputs["router_loss"]), rtol=1e-6)
    np.testing.assert_array_equal(again["expert_busiest"], outputs["expert_busiest"])
