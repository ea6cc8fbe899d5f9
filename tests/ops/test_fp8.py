"""The 8-bit matmul against an independent reference in NumPy: rounding, products, gradients, what remat keeps."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.errors import ConfigError
from jaxtrain.ops.linear import FORWARD, GRADIENT, fp8_matmul, linear, quantize, use_linear_format

# Eager operations compile one by one.
fast_quantize = jax.jit(quantize, static_argnums=1)
fast_matmul = jax.jit(fp8_matmul)
# One fusion.
there_and_back = jax.jit(lambda x, target: quantize(x, target).values.astype(jnp.bfloat16), static_argnums=1)

FORMATS = {"e4m3": (FORWARD, ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (GRADIENT, ml_dtypes.float8_e5m2, 57344.0)}


def spread(rng, shape, low=-20, high=5):
    """Numbers over many powers of two, so that some saturate a format's range and some are subnormal in it."""
    return rng.normal(size=shape) * np.exp2(rng.integers(low, high, size=shape))


def reference_quantize(x: np.ndarray, dtype, most: float) -> tuple[np.ndarray, float]:
    """Values on the format's grid as float64, and their unit, by logarithms and ml_dtypes' own rounding."""
    x = x.astype(np.float64)
    largest = np.abs(x).max(initial=0)
    unit = 2.0 ** -math.floor(math.log2(most / largest)) if largest else 1.0
    return np.clip(x / unit, -most, most).astype(np.float32).astype(dtype).astype(np.float64), unit


@pytest.mark.parametrize("factor", [1.0, 1e-20, 1e35], ids=str)
@pytest.mark.parametrize(("name", "dtype"), [("e4m3", jnp.float32), ("e5m2", jnp.bfloat16)])
def test_rounding(name, dtype, factor):
    """Bit for bit, under jit: a compiler that took the conversions for a detour would keep too many bits."""
    target, theirs, most = FORMATS[name]
    x = jnp.asarray(spread(np.random.default_rng(0), (64, 96)) * factor, dtype)
    scaled = fast_quantize(x, target)
    values, unit = reference_quantize(np.asarray(x), theirs, most)
    assert float(scaled.unit) == unit
    np.testing.assert_array_equal(np.asarray(scaled.values).astype(np.float64), values)
    raised = there_and_back(x, target)
    np.testing.assert_array_equal(np.asarray(raised).astype(np.float64), values)
    assert len(np.unique(np.abs(values))) > 50, "numbers on a few points of the grid would prove little"


def test_what_is_not_a_usual_number():
    """An infinity must not become the largest number: the step could not skip it."""
    assert np.isfinite(fast_quantize(np.zeros(0, np.float32), FORWARD).unit)
    for x, finite in (([0, 0], True), ([1, np.inf], False), ([1, np.nan], False), ([1e-44, 0], True)):
        assert bool(np.isfinite(fast_quantize(np.float32(x), FORWARD).unit)) is finite
        product = fast_matmul(np.float32([x]), np.ones((2, 1), np.float32))
        assert bool(np.all(np.isfinite(product))) is finite


def reference_matmul(x, kernel, gradient):
    """y, dx, dw in float64 from rounded operands."""
    (a, a_unit), (b, b_unit) = (reference_quantize(one, *FORMATS["e4m3"][1:]) for one in (x, kernel))
    c, c_unit = reference_quantize(gradient, *FORMATS["e5m2"][1:])
    return a @ b * (a_unit * b_unit), c @ b.T * (c_unit * b_unit), a.T @ c * (a_unit * c_unit)


# Sums of 48, 32 or 24 exact products in float32: 48 x 2^-24 of the sum of magnitudes at most, which is here within
# 1e2 of the largest results. The results in bfloat16 are rounded once: 2^-9.
@pytest.mark.parametrize(
    ("dtype", "tolerance", "leading"),
    [(jnp.float32, 1e-4, (24,)), (jnp.bfloat16, 2**-8, (2, 12))],
    ids=["rows in float32", "sequences in bf16"],
)
def test_products(dtype, tolerance, leading):
    rng = np.random.default_rng(1)
    x, kernel, gradient = (
        jnp.asarray(spread(rng, shape, -6, 3), dtype) for shape in ((*leading, 48), (48, 32), (*leading, 32))
    )

    @jax.jit
    def run(x, kernel, gradient):
        y, pull = jax.vjp(fp8_matmul, x, kernel)
        return y, *pull(gradient)

    found = run(x, kernel, gradient)
    rows = [np.asarray(one).astype(np.float64).reshape(-1, one.shape[-1]) for one in (x, kernel, gradient)]
    for one, expected in zip(found, reference_matmul(*rows), strict=True):
        assert one.dtype == dtype
        one = np.asarray(one).astype(np.float64).reshape(expected.shape)
        np.testing.assert_allclose(one, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())
    plain = rows[0] @ rows[1]
    assert np.abs(reference_matmul(*rows)[0] - plain).max() > 10 * tolerance * np.abs(plain).max(), "as good as exact"


def test_scales_by_powers_of_two_change_nothing():
    """What lets a shard choose its own scale, and a backend apply scales before or after the product."""
    rng = np.random.default_rng(2)
    x, kernel = (jnp.asarray(spread(rng, shape, -2, 2), jnp.bfloat16) for shape in ((16, 32), (32, 16)))
    small = fast_matmul(x * 2.0**-9, kernel) * 2.0**9
    np.testing.assert_array_equal(np.asarray(fast_matmul(x, kernel)), np.asarray(small))


def test_a_linear_layer_takes_the_format():
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(2, 4, 6)), jnp.bfloat16)
    kernel = jnp.asarray(rng.normal(size=(6, 2, 8)), jnp.bfloat16)
    bias = jnp.asarray(rng.normal(size=kernel.shape[1:]), jnp.bfloat16)

    @jax.jit
    def run(x):
        with use_linear_format("fp8", required_of="this"):
            rounded = linear(x, kernel, bias, low_precision=True)
            output = linear(x, kernel, bias)
        product = fp8_matmul(x.reshape(8, 6), kernel.reshape(6, 16)).reshape(rounded.shape)
        outside = linear(x, kernel, bias, low_precision=True)
        return rounded, product + bias, output, outside, linear(x, kernel, bias)

    rounded, expected, output, outside, plain = map(np.asarray, run(x))
    np.testing.assert_array_equal(rounded, expected)
    np.testing.assert_array_equal(output, plain)
    np.testing.assert_array_equal(outside, plain)
    assert not np.array_equal(rounded, plain)


def test_a_model_without_linear_layers_is_told():
    with (
        pytest.raises(ConfigError, match=r"precision.policy=fp8 .* model net has none.*use precision.policy=bf16"),
        use_linear_format("fp8", required_of="net"),
    ):
        linear(jnp.ones((1, 2)), jnp.ones((2, 2)))  # without low_precision, as an output layer is


def test_remat_keeps_the_product_once():
    """In the compute dtype, and no 8-bit copy beside it."""

    def block(x, kernel):
        return jnp.sin(checkpoint_name(fp8_matmul(jnp.sin(x), kernel), "result"))

    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 16), (16, 32)))
    block = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    pull = jax.eval_shape(lambda *a: jax.vjp(block, *a)[1], *shapes)
    kept = sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(pull))
    assert kept == [((8, 16), "bfloat16"), ((8, 32), "bfloat16"), ((16, 32), "bfloat16")], "inputs and the product"
