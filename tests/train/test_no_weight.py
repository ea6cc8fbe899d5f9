"""A batch in which nothing has a weight leaves the state as it was, and ends no run."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt

ROWS, LENGTH, VOCABULARY = 8, 8, 16
SIZES = dict(kind="transformer", embed_dim=8, num_heads=2, mlp_dim=8, max_sequence_length=LENGTH)


def called(apply: Any, batch: Any, key: jax.Array) -> Any:
    losses = jt.cross_entropy(apply(batch["inputs"]), batch["targets"])
    weights = jnp.broadcast_to(batch["weights"], losses.shape)
    return jnp.sum(losses * weights), jnp.sum(weights), {}


def batch(number: int, weights: Any = 1.0) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(number).integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
    weights = np.broadcast_to(np.asarray(weights, np.float32), (ROWS, LENGTH)).copy()
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def make_step(task: Any = None, degrees: dict[str, int] | None = None, **options: Any) -> jt.TrainStep:
    degrees = degrees or {"data": 1}
    return jt.make_train_step(
        jt.build_model({**SIZES, "num_layers": degrees.get("pipe", 1)}, input_shape=(LENGTH,), vocab_size=VOCABULARY),
        task or jt.language_modeling(),
        optax.adamw(lambda count: 1e-2 / (1 + count), weight_decay=0.5),
        mesh=jt.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())]),
        ema_decay=0.9,
        clip_norm=1.0,
        **options,
    )


def kept(state: jt.TrainState) -> Any:
    """All that a skipped step leaves as it was; a task reads the step for its random numbers alone."""
    return jax.device_get(dataclasses.replace(state, step=jnp.int32(0), key=None, skipped=None))


@pytest.fixture(scope="module")
def calling() -> jt.TrainStep:
    return make_step(jt.Task.calling("own", called))


CASES = {
    "a task that calls the model": None,
    "fp16": dict(policy="fp16"),
    "ZeRO 2": dict(degrees={"data": 2}, accumulation_steps=2, parallelism=jt.Parallelism(zero=2)),
    "pipeline": dict(degrees={"pipe": 2, "data": 2}, accumulation_steps=2),
}
LONG = ("ZeRO 2", "pipeline", "fp16")


@pytest.mark.parametrize(
    "options",
    [pytest.param(CASES[name], id=name, marks=[pytest.mark.long] if name in LONG else []) for name in CASES],
)
def test_it_is_as_if_the_batch_had_not_been_there(options: dict[str, Any] | None, calling: jt.TrainStep) -> None:
    step = calling if options is None else make_step(**options)
    state = step.init(0)
    for number in range(2):
        state, _ = step(state, batch(number))
    before, skipped = kept(state), int(state.skipped.total)
    for number in range(2):
        state, metrics = step(state, batch(number, weights=0.0))
        assert (math.isnan(metrics["loss"]), float(metrics["weight"])) == (True, 0.0)
        assert int(metrics["skipped_in_a_row"]) == 0
    jax.tree.map(np.testing.assert_array_equal, before, kept(state))
    assert (int(state.step), int(state.skipped.total)) == (4, skipped + 2)
    # One row has a weight: the other shard, or microbatch, or both, have none.
    weights = np.zeros((ROWS, 1))
    weights[0] = 1
    state, metrics = step(state, batch(9, weights=weights))
    assert int(state.skipped.total) == skipped + 2
    assert np.isfinite(metrics["loss"])
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (before, kept(state))), strict=True))


def test_it_neither_counts_in_a_row_of_bad_steps_nor_ends_one(calling: jt.TrainStep) -> None:
    bad, empty = batch(0), batch(1, weights=0.0)
    bad["weights"][:] = np.inf
    state, found = calling.init(0), []
    for rows in (bad, empty, bad, empty, batch(2)):
        state, metrics = calling(state, rows)
        found.append(int(metrics["skipped_in_a_row"]))
    assert found == [1, 1, 2, 2, 0]
    assert int(state.skipped.total) == 4
