"""The flattened linear layer against einsum, forward and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops.linear import linear

# leading dims, input dims, output dims, einsum
SHAPES = {
    "one row": ((), (5,), (3,), "d,df->f"),
    "rows": ((4,), (5,), (3,), "nd,df->nf"),
    "tokens": ((2, 4), (5,), (3,), "bld,df->blf"),
    "to heads": ((2, 4), (6,), (2, 3), "bld,dhk->blhk"),
    "from heads": ((2, 4), (2, 3), (6,), "blhk,hkd->bld"),
    "heads to heads": ((2, 4), (2, 3), (3, 5), "blhk,hkgm->blgm"),
    "no rows": ((0, 4), (5,), (3,), "bld,df->blf"),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("leading", "inputs", "outputs", "equation"), SHAPES.values(), ids=SHAPES)
def test_linear_is_einsum(leading, inputs, outputs, equation, bias):
    rng = np.random.default_rng(0)
    x, kernel, offset, weight = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((*leading, *inputs), (*inputs, *outputs), outputs, (*leading, *outputs))
    )

    def fast(x, kernel, offset):
        y = linear(x, kernel, offset if bias else None, num_input_dims=len(inputs))
        return jnp.sum(y * weight), y

    def plain(x, kernel, offset):
        y = jnp.einsum(equation, x, kernel) + (offset if bias else 0)
        return jnp.sum(y * weight), y

    (found, y), gradients = jax.jit(jax.value_and_grad(fast, (0, 1, 2), has_aux=True))(x, kernel, offset)
    (expected, reference), expected_gradients = jax.jit(jax.value_and_grad(plain, (0, 1, 2), has_aux=True))(
        x, kernel, offset
    )
    assert y.shape == reference.shape
    # Sums of at most 8 products in fp32, in another order.
    for one, other in zip((y, found, *gradients), (reference, expected, *expected_gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_linear_keeps_the_dtype():
    x, kernel, bias = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16), jnp.ones((3,), jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        assert linear(x, kernel, bias).dtype == jnp.bfloat16
