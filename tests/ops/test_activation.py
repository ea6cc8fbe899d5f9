"""GELU's own backward pass against its formula, and every nonlinearity far from zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.layers import Norm
from jaxtrain.ops.attention.reference import capped
from jaxtrain.ops.elementwise import gelu


@jax.jit
def slopes(x):
    out, pull = jax.vjp(gelu, x)
    return out, *pull(jnp.ones_like(x))


# Where tanh nears 1 its rounding (6e-8) meets factors of up to 200 (x times the inner slope, against float64); bf16: a
# rounding of 4e-3 each of six products.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1.2e-5), ("bfloat16", 3e-2)])
def test_gelu_is_its_formula(dtype, tolerance):
    x = jnp.asarray(np.linspace(-8, 8, 257), dtype)
    exact = np.asarray(x, np.float64)
    inner = np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * exact**2) / np.cosh(inner) ** 2
    wanted = 0.5 * exact * (1 + np.tanh(inner)), 0.5 * (1 + np.tanh(inner)) + 0.5 * exact * slope
    for found, expected in zip(slopes(x), wanted, strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=tolerance)


def norm(kind):
    return lambda x: Norm(x.shape[-1], kind=kind, bias=False, epsilon=1e-6)(x)


NONLINEARITIES = {
    "gelu": gelu,
    "silu": jax.nn.silu,
    "softcap": lambda x: capped(x, 30.0),
    "rmsnorm": norm("rmsnorm"),
    "layernorm": norm("layernorm"),
}


def test_gradients_are_finite_wherever_float16_is():
    far = np.geomspace(1e-7, 65504, 400)
    x = np.concatenate([-far, [0.0], far])
    # float16 and bfloat16 round each of some products: 5e-4 and 4e-3 of sizes up to a few.
    tolerances = {"float16": 1e-2, "bfloat16": 5e-2}

    @jax.jit
    def run(x):
        found = {}
        for name, function in NONLINEARITIES.items():
            out, pull = jax.vjp(function, x)
            found[name] = out, *pull(jnp.ones_like(x))
        return found

    for dtype, tolerance in tolerances.items():
        rounded = jnp.asarray(x, dtype)
        found, expected = run(rounded), run(rounded.astype(jnp.float32))
        for name in NONLINEARITIES:
            for one, other in zip(found[name], expected[name], strict=True):
                assert np.all(np.isfinite(other))
                np.testing.assert_allclose(np.float32(one), other, rtol=tolerance, atol=tolerance, err_msg=name)
    ends = jnp.asarray([-65504, -300, -16, 16, 300, 65504], jnp.float16)
    np.testing.assert_array_equal(slopes(ends)[1], [0, 0, 0, 1, 1, 1])
