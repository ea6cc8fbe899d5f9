"""The linear layer, with kernels of floats and of 8-bit integers, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops.linear import int8_matmul, linear
from jaxtrain.precision.kernels import quantize_kernel, round_to_int8


def test_rounding_is_within_half_a_step():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(3, 40, 24)) * np.exp2(rng.integers(-9, 9, size=(3, 1, 24)))).astype(np.float32)
    x[1, :, 5] = 0
    values, scale = map(np.asarray, jax.jit(round_to_int8, static_argnums=1)(x, (1,)))
    assert (values.dtype, scale.dtype, scale.shape) == (np.int8, np.float32, (3, 1, 24))
    assert (np.abs(values.astype(int)).max(axis=1)[x.any(axis=1)] == 127).all(), "each channel uses its whole range"
    assert (np.abs(values * scale - x) <= 0.5 * scale * (1 + 1e-5)).all()


fast_quantize = jax.jit(quantize_kernel, static_argnums=(1, 2))


def test_products():
    rng = np.random.default_rng(2)
    x, weights = rng.normal(size=(2, 3, 6)).astype(np.float32), rng.normal(size=(6, 2, 4)).astype(np.float32)
    kernel = fast_quantize(weights, 1, 2)
    values, scale = np.asarray(kernel.values, np.float64), np.asarray(kernel.scale, np.float64)
    # Sums of six numbers in float32.
    expected = np.einsum("bld,dhk->blhk", x, values * scale)
    np.testing.assert_allclose(jax.jit(linear)(x, kernel), expected, rtol=1e-5, atol=1e-5)


def test_gradients_pass_through_a_frozen_kernel():
    """To what stands before it: what adapters over quantized weights will ask for."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(5, 6)).astype(np.float32)
    kernel = fast_quantize(rng.normal(size=(6, 4)).astype(np.float32), 1, 1)
    whole = np.asarray(kernel.values, np.float64) * np.asarray(kernel.scale)
    found = jax.jit(jax.grad(lambda x: jnp.sum(int8_matmul(x, kernel) ** 2)))(x)
    np.testing.assert_allclose(found, 2 * x @ whole @ whole.T, rtol=1e-5, atol=1e-5)


# leading dims, input dims, output dims, einsum
SHAPES = {
    "one row": ((), (5,), (3,), "d,df->f"),
    "to heads": ((2, 4), (6,), (2, 3), "bld,dhk->blhk"),
    "from heads": ((2, 4), (2, 3), (6,), "blhk,hkd->bld"),
    "heads to heads": ((2, 4), (2, 3), (3, 5), "blhk,hkgm->blgm"),
    "no rows": ((0, 4), (5,), (3,), "bld,df->blf"),
}


@pytest.mark.parametrize(("leading", "inputs", "outputs", "equation"), SHAPES.values(), ids=SHAPES)
def test_linear_is_einsum(leading, inputs, outputs, equation):
    """Forward and gradients, with a bias where there is more than one row."""
    rng = np.random.default_rng(0)
    shapes = ((*leading, *inputs), (*inputs, *outputs), outputs, (*leading, *outputs))
    x, kernel, offset, weight = (rng.normal(size=shape).astype(np.float32) for shape in shapes)

    def fast(x, kernel, offset):
        y = linear(x, kernel, offset if leading else None, num_input_dims=len(inputs))
        return jnp.sum(y * weight), y

    (_, y), gradients = jax.jit(jax.value_and_grad(fast, (0, 1, 2), has_aux=True))(x, kernel, offset)
    of_x, rest = equation.split(",")
    of_kernel, of_y = rest.split("->")
    rows = tuple(range(len(leading)))
    expected = (
        np.einsum(equation, x, kernel) + (offset if leading else 0),
        np.einsum(f"{of_y},{of_kernel}->{of_x}", weight, kernel),
        np.einsum(f"{of_x},{of_y}->{of_kernel}", x, weight),
        weight.sum(rows) if leading else 0 * offset,
    )
    # Sums of at most 8 products in fp32, in another order.
    for one, other in zip((y, *gradients), expected, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
