"""The norm of all gradients, in one sum and in slices."""

import jax
import numpy as np
import optax
import pytest

from jaxtrain.train.gradient_norm import gradient_norm


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((3, 3, 128, 64), id="large: in slices"),
        pytest.param((257, 255), id="large, and does not divide"),
        pytest.param((7,), id="small"),
    ],
)
def test_slices_give_the_norm(shape):
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    tree = {"a": values, "frozen": None, "b": np.array([3.0, 4.0], np.float32)}
    found, expected = jax.jit(lambda tree: (gradient_norm(tree, sliced=True), optax.tree.norm(tree)))(tree)
    # float32 sums of 73,728 squares, in another order.
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("shape", [(16, 2**12), (7,)], ids=["large", "small"])
def test_complex_numbers_count_by_their_magnitude(shape):
    values = np.full(shape, 3 + 4j, np.complex64)
    norm = gradient_norm({"a": values}, sliced=True)
    assert norm.dtype == np.float32
    np.testing.assert_allclose(norm, 5 * np.sqrt(values.size), rtol=1e-5)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_one_bad_number_shows_in_the_norm(bad):
    values = np.zeros((16, 2**12), np.float32)
    values[3, 5] = bad
    assert not np.isfinite(gradient_norm({"a": values}, sliced=True))


def test_the_norm_of_nothing_that_is_trained_is_zero():
    assert gradient_norm({"frozen": None}, sliced=True) == 0
