"""Batch norm, max-pooling and convolutions in their forms for CPU, against the plain forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops import images

# float32 sums of at most 2,304 products, in another order.
RTOL = ATOL = 1e-4


def drawn(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(0.5, 1.0, shape), dtype)


def agree(fast, plain, *arguments, rtol=RTOL, atol=ATOL):
    """Compare outputs, and the gradients of a sum of the outputs by random weights, of two functions."""
    shapes = jax.eval_shape(plain, *arguments)
    cotangents = jax.tree.map(lambda one: drawn(*one.shape, seed=9, dtype=one.dtype), shapes)

    @jax.jit
    def both(arguments):
        results = []
        for function in (fast, plain):
            outputs, pull = jax.vjp(function, *arguments)
            results.append((outputs, pull(cotangents)))
        return results

    found, expected = both(arguments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("side", "inputs", "outputs", "size", "stride"),
    [
        pytest.param(4, 8, 16, 1, 1, id="a 1x1 kernel is one product"),
        pytest.param(5, 8, 6, 1, 2, id="a 1x1 kernel with a stride, an odd side"),
        pytest.param(3, 64, 24, 3, 1, id="few pixels, many channels"),
        pytest.param(2, 4, 8, 3, 1, id="2x2 pixels: a product for each tap"),
        pytest.param(4, 4, 8, 3, 2, id="2x2 pixels by a stride"),
        pytest.param(2, 4, 8, 7, 2, id="a kernel larger than the image", marks=pytest.mark.long),
        pytest.param(3, 64, 4, 5, 1, id="few pixels, a 5x5 kernel", marks=pytest.mark.long),
        pytest.param(6, 4, 8, 3, 1, id="many pixels: plain, with gradients of its own"),
    ],
)
def test_convolutions_are_the_plain_ones(side, inputs, outputs, size, stride):
    x, kernel = drawn(2, side, side, inputs), drawn(size, size, inputs, outputs, seed=1)
    agree(
        functools.partial(images.convolve, stride=stride),
        lambda x, kernel: images.reference_convolve(x, kernel, stride),
        x,
        kernel,
    )


def test_products_of_taps_are_rounded_once():
    dtype, bits = jnp.bfloat16, 8
    x, kernel = drawn(2, 2, 2, 16, dtype=dtype), drawn(3, 3, 16, 64, seed=1, dtype=dtype)
    found = jax.jit(functools.partial(images.convolve, stride=1))(x, kernel)
    assert found.dtype == dtype
    exact = images.reference_convolve(x.astype(jnp.float32), kernel.astype(jnp.float32), 1)
    # Half of the last bit, and sums of 64 products in float32 in another order.
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=2.0**-bits, atol=1e-5)


@pytest.mark.parametrize(
    "shape", [pytest.param((3, 8, 4, 5), id="eight slices"), pytest.param((2, 12, 2, 3), id="six slices of two rows")]
)
def test_batch_norm_is_the_plain_one(shape):
    arguments = (drawn(*shape), drawn(shape[-1], seed=1), drawn(shape[-1], seed=2))
    agree(images.batch_norm, images.reference_batch_norm, *arguments)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(drawn(2, 6, 8, 3), id="no equal numbers"),
        pytest.param(jnp.maximum(drawn(2, 8, 6, 3), 0.5), id="many equal numbers: the first takes the gradient"),
        pytest.param(drawn(2, 4, 4, 3, dtype=jnp.bfloat16), id="bfloat16"),
        pytest.param(drawn(2, 5, 6, 3), id="an odd side: plain", marks=pytest.mark.long),
    ],
)
def test_max_pooling_is_the_plain_one(x):
    # The same numbers in other sums of at most four; bfloat16 rounds those.
    tolerance = 0.02 if x.dtype == jnp.bfloat16 else 1e-6
    agree(images.max_pool, images.reference_max_pool, x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("size", "stride"), [pytest.param(3, 1, id="3x3"), pytest.param(1, 1, id="1x1"), pytest.param(3, 2, id="a stride")]
)
def test_norm_and_convolution_as_one_operation_are_the_plain_ones(size, stride):
    x, kernel = drawn(2, 6, 6, 8), drawn(size, size, 8, 4, seed=1)
    scale, bias = drawn(8, seed=2), drawn(8, seed=3)

    def plain(x, scale, bias, kernel):
        y, mean, variance = images.reference_batch_norm(x, scale, bias)
        return images.reference_convolve(jax.nn.relu(y), kernel, stride), mean, variance

    fused = functools.partial(images.normalise_and_convolve, stride=stride)
    agree(fused, plain, x, scale, bias, kernel)


def test_the_backward_pass_of_norm_and_convolution_keeps_one_array_of_the_images_size():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 6, 6, 8), (8,), (8,), (3, 3, 8, 4))]
    fused = functools.partial(images.normalise_and_convolve, stride=1)
    pull = jax.eval_shape(lambda *a: jax.vjp(fused, *a)[1], *shapes)
    size = shapes[0].size
    assert sum(leaf.size for leaf in jax.tree.leaves(pull) if leaf.size >= size) == size
