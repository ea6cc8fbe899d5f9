"""GELU's own backward pass against its formula, and every nonlinearity far from zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.model import MLPConfig
from jaxtrain.models.layers import Norm
from jaxtrain.models.shipped.mlp import mlp
from jaxtrain.ops.attention.reference import capped
from jaxtrain.ops.elementwise import gelu
from jaxtrain.ops.experts.compute import Kernels, grouped_experts


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


def test_mlp_with_gelu_has_finite_gradients_in_float16():
    model = mlp(MLPConfig(hidden_dims=(4,), activation="gelu", num_outputs=2), input_shape=(3,))
    shapes, model_state = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda p: np.full(p.shape, 0.5, np.float16), shapes)
    x = jnp.full((2, 3), 1000.0, jnp.float16)

    def loss(params):
        return jnp.sum(model.apply(params, model_state, x, key=None, train=True)[0].astype(jnp.float32))

    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


def test_experts_with_gelu_have_finite_gradients_in_float16():
    x = jnp.ones((4, 2), jnp.float16)
    up = jnp.full((1, 2, 3), 150.0, jnp.float16)  # 300 in the hidden layer
    kernels = Kernels(up, None, jnp.full((1, 3, 2), 0.1, jnp.float16))
    weights = jnp.ones((*x.shape[:-1], 1), jnp.float32)

    def loss(kernels):
        return jnp.sum(grouped_experts(x, weights, jnp.zeros(weights.shape, jnp.int32), kernels).astype(jnp.float32))

    # 4 tokens, x = 1, slope 1, two outputs of 0.1 each.
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(kernels).up, np.full((1, 2, 3), 0.8), rtol=2e-3)
