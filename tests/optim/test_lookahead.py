"""Lookahead against optax's; which weights evaluation uses: slow ones, averages of schedule-free methods, or ema."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jaxtrain as jt

BATCH = {"inputs": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), "targets": np.arange(8) % 4}
BATCH["targets"] = BATCH["targets"].astype(np.int32)


def make(optimizer: Any, **options: Any) -> Any:
    def init(key: jax.Array) -> dict[str, jax.Array]:
        a, b = jax.random.split(key)
        return {"first": 0.3 * jax.random.normal(a, (4, 8)), "head": 0.3 * jax.random.normal(b, (8, 4))}

    model = jt.from_functions(init, lambda params, x: jnp.tanh(x @ params["first"]) @ params["head"])
    mesh = jt.make_mesh(fsdp=2, devices=jax.devices()[:2])
    return jt.make_train_step(model, jt.classification(), optimizer, mesh=mesh, **options)


def train(step: Any, steps: int) -> Any:
    state = step.init(0)
    for _ in range(steps):
        state, _ = step(state, BATCH)
    return state


def assert_close(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)  # one rounding of float32 a step


def test_updates_are_those_of_optax() -> None:
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    pairs = optax.LookaheadParams.init_synced(params)
    ours = jt.lookahead(optax.adam(0.1), sync_period=3, slow_step_size=0.25)
    theirs = optax.lookahead(optax.adam(0.1), 3, 0.25)
    state, their_state = ours.init(params), theirs.init(pairs)
    update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    for _ in range(7):
        gradients = jax.tree.map(jnp.sin, params)
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        updates, their_state = their_update(jax.tree.map(jnp.sin, pairs.fast), their_state, pairs)
        pairs = optax.apply_updates(pairs, updates)
        assert_close((params, state.slow), (pairs.fast, pairs.slow))


def test_evaluation_uses_the_slow_weights_unless_there_is_an_average() -> None:
    state = train(make(jt.lookahead(optax.adam(0.1), sync_period=2)), 3)
    assert_close(state.evaluation_params, state.optimizer_state.slow)
    assert not np.allclose(state.params["head"], state.evaluation_params["head"])
    assert state.evaluation_params["head"].sharding == state.params["head"].sharding
    averaged = make(jt.lookahead(optax.adam(0.1), sync_period=2), ema_decay=0.9).init(0)
    assert averaged.evaluation_params["head"] is averaged.ema["head"]


@pytest.mark.long
def test_evaluation_uses_the_average_of_schedule_free_methods_for_what_they_train() -> None:
    """In one part of a partition, beside a frozen parameter or one of another optimizer."""
    free = optax.contrib.schedule_free_sgd(0.5)
    parts = optax.partition({"free": free, "plain": optax.sgd(0.1)}, {"first": "free", "head": "plain"})
    state = train(make(parts), 3)
    inner = state.optimizer_state.inner_states["free"].inner_state
    expected = optax.contrib.schedule_free_eval_params(inner._replace(z=inner.z["first"]), state.params["first"])
    assert_close(state.evaluation_params["first"], expected)
    assert not np.allclose(state.params["first"], expected)
    np.testing.assert_array_equal(state.evaluation_params["head"], state.params["head"])
