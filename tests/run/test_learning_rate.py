"""The learning-rate range test."""

import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt


def test_the_rate_that_is_suggested_trains_and_the_test_ends_where_rates_diverge(tmp_path):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(256, 8)).astype(np.float32)
    rows = {"inputs": x, "targets": (x @ draw.normal(size=(8, 1))).astype(np.float32)}
    model = jt.from_functions(lambda key: {"w": jnp.zeros((8, 1))}, lambda params, x: x @ params["w"])
    found = jt.find_learning_rate(model, "mse", optax.sgd, data=rows, batch_size=32, lowest=1e-4, highest=100.0)
    # Gradient descent diverges from 2 / the largest eigenvalue of 2 x'x / n on.
    limit = 1 / np.linalg.eigvalsh(x.T @ x / len(x))[-1]
    assert limit / 100 < found.suggestion < limit
    noise = {**rows, "targets": 1000 + 100 * draw.normal(size=(256, 1)).astype(np.float32)}
    assert jt.find_learning_rate(model, "mse", data=noise, highest=1.0).suggestion > 1e-4
    assert limit < found.rates[-1] < 100
    assert found.plot(tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
