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


def test_an_optimizer_that_reads_the_loss_is_given_none() -> None:
    """As 0 it would be the best loss ever, after which the rate only falls."""
    model = jt.from_functions(lambda key: {"w": jnp.zeros((4, 3))}, lambda params, x: x @ params["w"])
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=2)
    step = jt.make_train_step(model, jt.classification(), optax.chain(optax.sgd(0.1), plateau))
    inputs = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    rows = {"inputs": inputs, "targets": np.argmax(inputs[:, :3], -1).astype(np.int32)}
    state = step.init(0)
    for number in range(8):
        targets = np.full(8, -100, np.int32) if number == 3 else rows["targets"]
        state, _ = step(state, {**rows, "targets": targets})
    assert float(state.optimizer_state[1].best_value) > 0.5
    assert float(state.optimizer_state[1].scale) == 1


def test_it_neither_counts_in_a_row_of_bad_steps_nor_ends_one(calling: jt.TrainStep) -> None:
    bad, empty = batch(0), batch(1, weights=0.0)
    bad["weights"][:] = np.inf
    state, found = calling.init(0), []
    for rows in (bad, empty, bad, empty, batch(2)):
        state, metrics = calling(state, rows)
        found.append(int(metrics["skipped_in_a_row"]))
    assert found == [1, 1, 2, 2, 0]
    assert int(state.skipped.total) == 4


def test_weights_that_cancel_train(calling: jt.TrainStep) -> None:
    """Advantages of both signs may sum to 0, and say something all the same."""
    state = calling.init(0)
    before = kept(state)
    state, metrics = calling(state, batch(0, np.where(np.arange(ROWS) % 2, 1.0, -1.0)[:, None]))
    assert float(metrics["weight"]) == 0
    assert float(metrics["grad_norm"]) > 0
    assert int(metrics["skipped_steps"]) == 0
    moved = jax.tree.map(lambda old, new: np.any(old != new), before.params, jax.device_get(state.params))
    assert all(jax.tree.leaves(moved))
