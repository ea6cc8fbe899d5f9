"""GELU's own backward pass against autodiff of the plain formula, and every nonlinearity far from zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.models import MLPConfig
from jaxtrain.models.layers import Norm
from jaxtrain.models.shipped.mlp import mlp
from jaxtrain.ops.activation import gelu
from jaxtrain.ops.attention.reference import capped
from jaxtrain.ops.experts.compute import Kernels, grouped_experts


# Where tanh nears 1 the square of its rounding (6e-8) meets factors of up to 40; bf16: a rounding of 4e-3 each of six
# products.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-6), ("bfloat16", 3e-2)])
def test_gelu_is_that_of_jax(dtype, tolerance):
    x = jnp.asarray(np.linspace(-8, 8, 257), dtype)

    def both(function):
        out, pull = jax.vjp(function, x)
        return out, *pull(jnp.ones_like(x))

    for found, plain in zip(both(gelu), both(jax.nn.gelu), strict=True):
        assert found.dtype == plain.dtype
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(plain, np.float32), atol=tolerance)


NONLINEARITIES = {
    "gelu": gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "softcap": lambda x: capped(x, 30.0),
    "rmsnorm": lambda x: Norm(x.shape[-1], kind="rmsnorm", bias=False, epsilon=1e-6)(x),
    "layernorm": lambda x: Norm(x.shape[-1], kind="layernorm", bias=False, epsilon=1e-6)(x),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", NONLINEARITIES)
def test_gradients_are_finite_wherever_float16_is(name, dtype):
    far = np.geomspace(1e-7, 65504, 400)
    x = jnp.asarray(np.concatenate([-far, [0.0], far]), dtype)
    function = NONLINEARITIES[name]
    out, pull = jax.vjp(function, x)
    (found,) = pull(jnp.ones_like(x))
    expected_out, pull = jax.vjp(function, x.astype(jnp.float32))
    (expected,) = pull(jnp.ones(x.shape, jnp.float32))
    # float16 and bfloat16 round each of some products: 5e-4 and 4e-3 of sizes up to a few.
    tolerance = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-6}[dtype]
    np.testing.assert_allclose(np.asarray(out, np.float32), expected_out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=tolerance, atol=tolerance)


def test_a_slope_far_out_is_that_of_a_line():
    x = jnp.asarray([-65504, -300, -256, -16, 16, 256, 300, 65504], jnp.float16)
    np.testing.assert_array_equal(jax.vjp(gelu, x)[1](jnp.ones_like(x))[0], [0, 0, 0, 0, 1, 1, 1, 1])


def test_experts_with_gelu_have_finite_gradients_in_float16():
    x = jnp.ones((4, 2), jnp.float16)
    up = jnp.full((1, 2, 3), 150.0, jnp.float16)  # 300 in the hidden layer
    kernels = Kernels(up, None, jnp.full((1, 3, 2), 0.1, jnp.float16))
    weights = jnp.ones((*x.shape[:-1], 1), jnp.float32)

    def loss(kernels):
        return jnp.sum(grouped_experts(x, weights, jnp.zeros(weights.shape, jnp.int32), kernels).astype(jnp.float32))

    gradient = jax.grad(loss)(kernels)
    # 4 tokens, x = 1, slope 1, two outputs of 0.1 each.
    np.testing.assert_allclose(gradient.up, np.full((1, 2, 3), 0.8), rtol=2e-3)


def test_mlp_with_gelu_has_finite_gradients_in_float16():
    model = mlp(MLPConfig(hidden_dims=(4,), activation="gelu", num_outputs=2), input_shape=(3,))
    params, model_state = model.init(jax.random.key(0))
    params = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    x = jnp.full((2, 3), 1000.0, jnp.float16)

    def loss(params):
        return jnp.sum(model.apply(params, model_state, x, key=None, train=True)[0].astype(jnp.float32))

    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(jax.grad(loss)(params)))
