"""Spikes inside the step: which steps are one, and that a spike leaves everything but the counts as it was."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt

RULE = jt.SpikeRule(window=8, sigmas=4.0)


def make_step(**options: Any) -> jt.TrainStep:
    """The loss of a batch is the number that it holds; its gradient norm is another one."""

    def loss(apply: Any, batch: Any, key: jax.Array) -> Any:
        kernel = apply(batch["inputs"])
        number, slope = jnp.mean(batch["loss"]), jnp.mean(batch["slope"])
        # The gradient by the kernel is the slope, whatever the kernel is.
        weight = jnp.mean(batch["weight"])
        return weight * (number + slope * (kernel - jax.lax.stop_gradient(kernel))), weight, {}

    model = jt.from_functions(lambda key: {"kernel": jnp.float32(1)}, lambda params, inputs: params["kernel"])
    return jt.make_train_step(model, jt.Task.calling("given", loss), optax.adam(1e-2), **options)


def batch(loss: float, slope: float, weight: float = 1.0) -> dict[str, np.ndarray]:
    values = {"inputs": 0, "loss": loss, "slope": slope, "weight": weight}
    return {name: np.full(8, value, np.float32) for name, value in values.items()}


def judged(series: np.ndarray, rule: jt.SpikeRule) -> list[bool]:
    """The rule in NumPy and float64: `series` [steps, 2] of losses and gradient norms."""
    accepted: list[np.ndarray] = []
    found = []
    for now in series:
        last = np.array(accepted[-rule.window :], np.float64).reshape(-1, 2)
        spike = False
        if np.isfinite(now).all() and len(accepted) >= rule.window // 2:
            mean = last.mean(0)
            deviation = np.maximum(last.std(0, ddof=1), 1e-3 * np.abs(mean))
            above = now > mean + rule.sigmas * deviation
            spike = bool({"both": above.any(), "loss": above[0], "grad_norm": above[1]}[rule.watch])
        found.append(spike)
        if np.isfinite(now).all() and not spike:
            accepted.append(now)
    return found


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(RULE, id="both"),
        pytest.param(jt.SpikeRule(window=8, sigmas=4.0, watch="loss"), id="loss"),
        pytest.param(jt.SpikeRule(window=8, sigmas=4.0, watch="grad_norm"), id="grad_norm"),
    ],
)
def test_the_rule_is_that_of_numpy(rule: jt.SpikeRule) -> None:
    """Losses and slopes at random, with spikes of either, of both, and numbers that are not finite."""
    series = np.random.default_rng(1).normal([5.0, 2.0], [0.3, 0.1], size=(40, 2))
    # Within the first half window, later, one right after the other, a fall (none), and a constant stretch.
    for step, loss, slope in ((2, 50, 2), (12, 50, 2), (17, 5, 30), (18, 60, 40), (22, np.nan, 2), (27, -90, 2)):
        series[step] = loss, slope
    series = series.astype(np.float32)
    step = make_step(spikes=rule)
    state, found = step.init(0), []
    for row in series:
        state, metrics = step(state, batch(*row))
        found.append(bool(metrics["spiked"]))
    assert found == judged(series, rule)
    assert sum(found) >= 2
    assert state.spikes is not None
    assert (int(state.spikes.spikes), int(metrics["spikes"])) == (sum(found), sum(found))
    # Neither spikes nor steps that are not finite advance the optimizer, and with it its schedule.
    assert int(state.optimizer_state[0].count) == 40 - sum(found) - 1
    assert int(state.skipped.total) == sum(found) + 1


def test_a_spike_leaves_the_state_as_it_was() -> None:
    step = make_step(spikes=RULE, ema_decay=0.9)
    state = step.init(0)
    for i in range(6):
        state, _ = step(state, batch(5 + 0.1 * (i % 2), 2))
    before = jax.device_get((state.params, state.optimizer_state, state.ema, state.spikes))
    state, metrics = step(state, batch(500, 2))
    after = jax.device_get((state.params, state.optimizer_state, state.ema, state.spikes))
    assert (int(metrics["spiked"]), int(metrics["skipped_in_a_row"]), int(state.step)) == (1, 1, 7)
    for old, new in zip(jax.tree.leaves(before)[:-1], jax.tree.leaves(after)[:-1], strict=True):
        np.testing.assert_array_equal(old, new)
    state, metrics = step(state, batch(5, 2))
    assert (int(metrics["spiked"]), int(metrics["skipped_in_a_row"])) == (0, 0)


def test_a_batch_without_weight_is_compared_with_nothing() -> None:
    """Its loss is no number: as 0 it would hide spikes of losses above 0, and be one itself among those below."""
    step = make_step(spikes=RULE)
    for sign in (1, -1):
        state = step.init(0)
        for i in range(6):
            state, metrics = step(state, batch(sign * 5 + 0.1 * (i % 2), 2, weight=float(i != 4)))
        assert state.spikes is not None
        assert (int(state.spikes.accepted), int(metrics["spikes"]), int(metrics["skipped_steps"])) == (5, 0, 1)
        state, metrics = step(state, batch(0, 0, weight=0.0))
        assert int(metrics["spiked"]) == 0
        state, metrics = step(state, batch(sign * 5 + 2, 2))
        assert int(metrics["spiked"]) == 1
