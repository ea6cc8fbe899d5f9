"""GELU's own backward pass against autodiff of the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops.activation import gelu


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
