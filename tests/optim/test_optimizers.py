"""Every optimizer: its first updates against numpy; the rate that it follows."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config.optimizers import AdafactorConfig, AdamWConfig, LionConfig, SGDConfig
from jaxtrain.optim.optimizers import build_optimizer

RATE = 0.1
KERNEL = np.array([[1.0, -2.0], [3.0, 4.0]])
GRADIENTS = [np.array([[0.5, -0.25], [2.0, 0.0]]), np.array([[-1.0, 0.5], [1.0, 3.0]])]


def sgd(p, gs, momentum, nesterov, decay):
    trace = np.zeros_like(p)
    for g in gs:
        trace = g + momentum * trace
        step = g + momentum * trace if nesterov else trace
        p = p - RATE * (step + decay * p)
    return p


def adamw(p, gs, b1, b2, epsilon, decay):
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gs, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        step = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + epsilon)
        p = p - RATE * (step + decay * p)
    return p


def lion(p, gs, b1, b2, decay):
    m = np.zeros_like(p)
    for g in gs:
        step = np.sign(b1 * m + (1 - b1) * g)
        m = b2 * m + (1 - b2) * g
        p = p - RATE * (step + decay * p)
    return p


def adafactor(p, gs, decay, b1=0.0):
    """Not factored (2x2 is below the limit): decay rate 1 - t^-0.8, update clipped to RMS 1, scaled by the RMS of p.

    What is averaged by `b1` are updates times their rate, and the decay is not averaged.
    """
    v, average = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gs, 1):
        b2 = 1 - t**-0.8
        v = b2 * v + (1 - b2) * (g * g + 1e-30)
        step = g / np.sqrt(v)
        step = step / max(1.0, np.sqrt(np.mean(step**2)))
        step = step * max(np.sqrt(np.mean(p**2)), 1e-3)
        average = b1 * average + (1 - b1) * RATE * step
        p = p - average - RATE * decay * p
    return p


# config, the same in numpy
CASES = {
    "sgd": (SGDConfig(momentum=0.0), lambda p, gs: sgd(p, gs, 0.0, False, 0.0)),
    "sgd nesterov": (SGDConfig(momentum=0.9, nesterov=True), lambda p, gs: sgd(p, gs, 0.9, True, 0.0)),
    "sgd with decay": (SGDConfig(momentum=0.9, weight_decay=0.2), lambda p, gs: sgd(p, gs, 0.9, False, 0.2)),
    "adamw with decay": (
        AdamWConfig(b1=0.8, b2=0.9, epsilon=1e-3, weight_decay=0.2),
        lambda p, gs: adamw(p, gs, 0.8, 0.9, 1e-3, 0.2),
    ),
    "lion with decay": (LionConfig(b1=0.5, b2=0.6, weight_decay=0.2), lambda p, gs: lion(p, gs, 0.5, 0.6, 0.2)),
    "adafactor with decay": (AdafactorConfig(weight_decay=0.2), lambda p, gs: adafactor(p, gs, 0.2)),
    "adafactor with decay and an average": (
        AdafactorConfig(b1=0.9, weight_decay=0.2),
        lambda p, gs: adafactor(p, gs, 0.2, b1=0.9),
    ),
}


@pytest.mark.parametrize(("config", "reference"), CASES.values(), ids=CASES)
def test_updates_are_those_of_the_paper(config, reference):
    optimizer = build_optimizer(config, optax.constant_schedule(RATE), axes={})
    params = {"kernel": jnp.asarray(KERNEL, jnp.float32)}
    state = optimizer.init(params)
    for count, gradient in enumerate(GRADIENTS, 1):
        updates, state = optimizer.update({"kernel": jnp.asarray(gradient, jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
        # A few fp32 operations on values near 1.
        np.testing.assert_allclose(params["kernel"], reference(KERNEL, GRADIENTS[:count]), rtol=1e-5, atol=1e-6)


def test_the_rate_follows_the_schedule():
    optimizer = build_optimizer(SGDConfig(momentum=0.0), lambda count: jnp.where(count == 0, 1.0, 0.25), axes={})
    params = {"kernel": jnp.zeros((2, 2))}
    state, gradient = optimizer.init(params), {"kernel": jnp.ones((2, 2))}
    found = []
    for _ in range(3):
        updates, state = optimizer.update(gradient, state, params)
        found.append(float(updates["kernel"][0, 0]))
    assert found == [-1.0, -0.25, -0.25]
