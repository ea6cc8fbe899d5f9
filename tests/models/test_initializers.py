"""Initial values: the right distribution, and exact arithmetic all the way."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models.initializers import fan_in_normal, normal


def test_draws_are_close_to_normal() -> None:
    values = np.asarray(normal(0.02)(jax.random.key(0), (1000, 1000), jnp.dtype(jnp.float32)), np.float64)
    # A million draws: standard errors are 2e-5 of the mean, 1.4e-5 of the deviation, 0.005 of the kurtosis.
    assert abs(values.mean()) < 1e-4
    assert abs(values.std() - 0.02) < 7e-5
    assert abs((values**4).mean() / values.var() ** 2 - 2.85) < 0.03
    assert np.abs(values).max() < 4.9 * 0.02
    assert len(np.unique(values)) > 100_000


def test_fan_in_sets_the_variance() -> None:
    values = fan_in_normal(2.0)(jax.random.key(0), (3, 3, 32, 64), jnp.dtype(jnp.float32))
    assert abs(float(jnp.std(values)) - (2 / 288) ** 0.5) < 1e-3


def test_bits_equal_a_computation_in_integers() -> None:
    """NumPy on whole integers gives the very bits that a compiled, fused program gives."""
    key, shape = jax.random.key(3), (5, 7)
    words = [np.asarray(jax.random.bits(k, shape, jnp.uint32), np.int64) for k in jax.random.split(key, 4)]
    total = sum((word & 0xFFFF) + (word >> 16) for word in words) - 4 * (2**16 - 1)
    scale = np.float32(0.5 / np.sqrt(8 * (2**32 - 1) / 12))
    drawn = jax.jit(lambda key: normal(0.5)(key, shape, jnp.dtype(jnp.float32)))(key)
    np.testing.assert_array_equal(np.asarray(drawn), total.astype(np.float32) * scale)
