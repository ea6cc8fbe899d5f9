"""Moments in bfloat16 and int8: what a number becomes, that rounding keeps the mean, and the updates that come out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config.optimizers import AdamWConfig
from jaxtrain.optim.moments import from_codes, largest_exponents, store_moments, to_codes
from jaxtrain.optim.optimizers import build_optimizer
from jaxtrain.optim.rules import moment_block


@partial(jax.jit, static_argnames=("block", "signed"))
def coded(x, random, *, block, signed):
    """What becomes of x, and its codes and exponents."""
    exponents = largest_exponents(x, block)
    codes = to_codes(x, exponents, random, signed=signed)
    return from_codes(codes, exponents, signed=signed), codes, exponents


RNG = np.random.default_rng(0)
SHAPE = (32, 256)


def mixed(shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Rows of very different size, as gradients of an embedding are."""
    rows = np.exp(3 * RNG.standard_normal((*shape[:-1], 1)))
    return (rows * RNG.standard_normal(shape)).astype(np.float32)


def test_blocks_come_from_the_shape():
    blocks = {
        (4096, 14336): 128,  # 112 blocks
        (4096, 768): 96,  # 8 shards of 96 are blocks; 6 blocks of 128 would be cut
        (3, 160, 4, 40): 40,
        (4096, 257): None,  # a prime
        (4095,): None,  # too small to matter
        (4096,): 128,
        (): None,
    }
    assert {shape: moment_block(shape) for shape in blocks} == blocks


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_is_near_and_right_in_the_mean(signed):
    x = mixed() if signed else mixed() ** 2
    decoded = []
    for seed in range(64):
        random = np.random.default_rng(seed).integers(0, 2**32, SHAPE, np.uint32)
        found, codes, exponents = coded(x, random, block=64, signed=signed)
        assert (codes.shape, codes.dtype) == (SHAPE, jnp.uint8)
        assert (exponents.shape, exponents.dtype) == ((32, 4), jnp.uint8)
        decoded.append(np.asarray(found))
    error = np.abs(np.array(decoded) / x - 1)
    largest = np.repeat(np.max(np.abs(x).reshape(32, 4, 64), axis=-1), 64, axis=-1)
    near = np.abs(x) > largest * 2.0 ** (-3 if signed else -7)
    held = np.abs(x) > largest * 2.0 ** (-12 if signed else -29)
    # 16 codes in the octaves next to the largest of a block, 4 in the last that it holds.
    assert np.max(error[:, near]) < 1 / 16
    assert np.max(error[:, held]) < 1 / 4
    # One standard deviation of a rounding is at most half a step; of the mean of 64 an eighth of that; 4.5 for the
    # largest of 8,192.
    assert np.max(np.abs(np.mean(decoded, axis=0) / x - 1)[near]) < 4.5 / 8 / 32
    assert np.max(np.abs(np.mean(decoded, axis=0) / x - 1)[held]) < 4.5 / 8 / 8
    assert np.mean(held) > 0.99


def test_the_second_moment_never_becomes_zero():
    """A block with numbers 2^40 apart: the small ones are held up, not dropped, while zeros stay zeros."""
    x = np.full((32, 256), 2.0**-40, np.float32)
    x[:, ::64], x[:, 1::64] = 1.0, 0.0
    x[1:4] = np.array([[2e-38], [3.3e38], [1e-44]])  # next to the smallest and largest normal number; subnormal
    decoded = np.asarray(coded(x, np.zeros(x.shape, np.uint32), block=64, signed=False)[0])
    assert np.all(decoded[4:, ::64] == 1.0)
    assert np.all(decoded[4:, 1::64] == 0.0)
    # The lowest of 31 octaves, the first of which begins at 1.
    np.testing.assert_array_equal(decoded[4:, 2::64], 2.0**-30)
    np.testing.assert_allclose(decoded[1:3], x[1:3], rtol=1 / 8)
    np.testing.assert_array_equal(decoded[3], 0)


def test_the_first_moment_keeps_14_octaves():
    x = np.array([[2.0**-n for n in range(64)] * 128], np.float32) * np.array([1, -1] * 4096, np.float32)
    x = x.reshape(SHAPE)
    decoded = np.asarray(coded(x, np.zeros(SHAPE, np.uint32), block=64, signed=True)[0]).reshape(128, 64)
    np.testing.assert_array_equal(decoded[:, :14], x.reshape(128, 64)[:, :14])
    assert not np.any(decoded[:, 14:])


# Relative to the norm of the update. bfloat16 has neighbours at most 2^-7 apart and an update depends on ten steps of
# roundings (b1=0.9, b2=0.95), measured 0.005; int8 has neighbours 2^-4 apart and more, measured 0.05.
FORMATS = {"bfloat16": 2.0**-7, "int8": 2.0**-4 * 1.5}


@pytest.mark.parametrize("moments", FORMATS)
def test_updates_are_near_those_of_float32(moments):
    params = {"kernel": jnp.zeros(SHAPE), "scale": jnp.zeros(256)}
    found = {}
    scale = mixed()
    for kind in ("float32", moments):
        optimizer = build_optimizer(AdamWConfig(moments=kind), optax.constant_schedule(1.0), axes={})
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for step in range(20):
            noise = np.random.default_rng(step).standard_normal(SHAPE)
            gradients = {"kernel": jnp.asarray(scale * (1 + noise), jnp.float32), "scale": jnp.ones(256) * step}
            found[kind], state = update(gradients, state, params)
    wanted = found["float32"]["kernel"]
    distance = np.linalg.norm(found[moments]["kernel"] - wanted) / np.linalg.norm(wanted)
    assert 1e-4 < distance < FORMATS[moments]
    # Small leaves are float32: nothing is lost.
    np.testing.assert_array_equal(found[moments]["scale"], found["float32"]["scale"])


@pytest.mark.parametrize("moments", FORMATS)
def test_a_second_moment_forgets_at_a_slow_decay(moments):
    """Rounded to nearest it would stand still: at b2 = 0.999 it shrinks by less than half a step of the format."""
    transformation = store_moments(optax.scale_by_adam(0.9, 0.999), moments, nonnegative=("nu",))
    plain = optax.scale_by_adam(0.9, 0.999)
    gradients = [jnp.ones((64, 128)), jnp.full((64, 128), 0.01)]
    state, exact = transformation.init(gradients[0]), plain.init(gradients[0])
    update, update_exact = jax.jit(transformation.update), jax.jit(plain.update)
    for step in range(700):
        gradient = gradients[min(step, 1)]
        found, state = update(gradient, state)
        wanted, exact = update_exact(gradient, exact)
    # 700 steps halve it. The mean over 8,192 elements is unbiased; standing still would give 0.7 of the update.
    np.testing.assert_allclose(np.mean(found), np.mean(wanted), rtol=0.03)
