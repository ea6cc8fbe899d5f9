"""The learning rate that the metrics show is the one that the optimizer uses, without being given twice."""

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt

DECAY = optax.linear_schedule(0.5, 0.1, 4)
# Optimizers whose update is the rate times the gradient.
PLAIN = {
    "a chain by hand": lambda: optax.chain(optax.identity(), optax.scale_by_schedule(DECAY), optax.scale(-1.0)),
    "a wrapper": lambda: optax.apply_if_finite(optax.sgd(DECAY), 3),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(DECAY),
}


def step_of(optimizer, **options):
    def apply(params, x):
        return x @ params["kernel"] + params["bias"]

    params = {"kernel": np.ones((4, 2), np.float32), "bias": np.zeros(2, np.float32)}
    model = jt.from_functions(lambda key: jax.tree.map(jax.numpy.asarray, params), apply)
    mesh = jt.make_mesh(devices=jax.devices()[:1])
    return jt.make_train_step(model, jt.regression(), optimizer, mesh=mesh, **options)


def batch():
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    return {"inputs": x, "targets": x[:, :2]}


@pytest.mark.parametrize("case", PLAIN)
def test_the_rate_of_the_metrics_is_the_ratio_of_update_and_gradient(case):
    step = step_of(PLAIN[case]())
    state = step.init(0)
    for _ in range(3):
        before = jax.device_get(state.params)
        state, metrics = step(state, batch())
        moved = optax.tree.norm(jax.tree.map(np.subtract, jax.device_get(state.params), before))
        np.testing.assert_allclose(metrics["learning_rate"], moved / metrics["grad_norm"], rtol=1e-4)
