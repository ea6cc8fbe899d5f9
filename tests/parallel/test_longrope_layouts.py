"""Packed rows under longrope, of short and long documents: the losses and parameters of one device on every layout."""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from layouts import COMPILER, ONE, Layout, distance, layout

from jaxtrain.layout.mesh import make_mesh
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.tasks import language_modeling
from jaxtrain.remat.policy import Remat
from jaxtrain.train.make_step import make_train_step

LENGTH, VOCABULARY, ROWS = 32, 24, 8
MODEL = dict(
    kind="transformer", num_layers=4, embed_dim=16, num_heads=4, mlp_dim=16, max_sequence_length=64,
    rope_scaling=dict(kind="longrope", short_factors=[1.0, 1.2], long_factors=[4.0, 8.0], original_length=10),
)  # fmt: skip


def _batch(number: int) -> dict:
    """Documents that cross the shards of a sequence, of 10 tokens and more; the tail of each row is padding."""
    random = np.random.default_rng(number)
    segments, positions = np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH), np.int32)
    for row in range(ROWS):
        first, second = 4 + row, 14
        segments[row, : first + second] = np.repeat([1, 2], [first, second])
        positions[row] = np.concatenate([np.arange(n) for n in (first, second, LENGTH - first - second)])
    tokens = random.integers(1, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    inputs = {"tokens": tokens, "segments": segments, "positions": positions}
    return {"inputs": inputs, "targets": np.roll(tokens, 3, axis=1), "weights": (segments != 0).astype(np.float32)}


def _run(where: Layout, *, accumulation: int = 1, remat: str = "none"):
    mesh = make_mesh(**{"data": 1, **where.degrees}, devices=jax.devices()[: math.prod(where.degrees.values())])
    step = make_train_step(
        build_model(MODEL, input_shape=(LENGTH,), vocab_size=VOCABULARY, remat=Remat(remat)),
        language_modeling(),
        optax.adamw(3e-3),
        mesh=mesh,
        accumulation_steps=accumulation,
        parallelism=where.options,
        compiler_options=COMPILER,
    )
    state, losses = step.init(0), []
    for number in range(3):
        state, metrics = step(state, _batch(number))
        losses.append(float(metrics["loss"]))
    return np.array(losses), jax.device_get(state.params)


@functools.cache
def _alone():
    return _run(ONE)


_ROWS = [
    pytest.param(layout(context=4, attention="ring"), 1, "full", id="ring-remat"),
    pytest.param(layout(pipe=2, context=2), 2, "none", id="pipe-context"),
    pytest.param(layout(context=2, data=2, attention="all_to_all"), 2, "sqrt", id="all_to_all-accumulation-sqrt"),
]


@pytest.mark.long
@pytest.mark.parametrize(("where", "accumulation", "remat"), _ROWS)
def test_numbers_of_one_device(where: Layout, accumulation: int, remat: str) -> None:
    losses, params = _run(where, accumulation=accumulation, remat=remat)
    expected, expected_params = _alone()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert distance(params, expected_params) < 1e-4  # AdamW divides by roots of small second moments
