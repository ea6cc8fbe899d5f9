"""4-bit normal floats equal bitsandbytes to the last bit.

Fixture: scripts/make_nf4_fixtures.py.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.formats.nf4 import dequantize_magnitudes, dequantize_rows
from jaxtrain.ops.linear import int8_matmul, nf4_matmul
from jaxtrain.precision import nf4
from jaxtrain.precision.kernels import quantize_kernel
from jaxtrain.precision.nf4 import dequantize, quantize_magnitudes, quantize_nf4

FIXTURE = dict(np.load(Path(__file__).parent / "nf4.npz"))
NAMES = sorted({name.split("/")[0] for name in FIXTURE if "/" in name})
# bitsandbytes takes torch's mean of the scales, which differs from the exact one in the last bit of some: the offset,
# and with it the scales of the scales, within two units in the last place of the largest number that they come from.
UNITS = 2 * 2.0**-23
ARRAYS = ("codes", "absmax", "nested_absmax", "offset")


def given(name: str) -> dict[str, np.ndarray]:
    return {key.partition("/")[2]: value for key, value in FIXTURE.items() if key.startswith(f"{name}/")}


@pytest.mark.parametrize("name", NAMES)
def test_codes_and_scales_equal_bitsandbytes(name, monkeypatch):
    wanted = given(name)
    single = jax.jit(lambda kernel: quantize_nf4(kernel, 1, 1, double=False))(wanted["weight"].T)
    np.testing.assert_array_equal(single.codes.T, wanted["codes"])
    np.testing.assert_array_equal(single.absmax.T, wanted["absmax"])
    small, nested, offset = jax.jit(quantize_magnitudes)(wanted["absmax"].reshape(-1))
    np.testing.assert_array_equal(small.reshape(wanted["doubled"].shape), wanted["doubled"])
    np.testing.assert_allclose(offset, wanted["offset"], rtol=UNITS)
    np.testing.assert_allclose(nested, wanted["nested_absmax"], atol=UNITS * wanted["absmax"].max(), rtol=0)
    # Below the same mean, to the last bit.
    monkeypatch.setattr(nf4, "_mean_magnitude", lambda absmax: jnp.float32(wanted["offset"]))
    small, nested, _ = jax.jit(lambda absmax: quantize_magnitudes(absmax))(wanted["absmax"].reshape(-1))
    np.testing.assert_array_equal(small.reshape(wanted["doubled"].shape), wanted["doubled"])
    np.testing.assert_array_equal(nested, wanted["nested_absmax"])


# Shape -> numbers of input and output dims: stacks, heads, ends of rows that are no whole block, many blocks of blocks.
KERNELS = {
    "a stack, half a block at the end": ((2, 96, 40), 1, 1),
    "heads in": ((3, 4, 32, 24), 2, 1),
    "heads out": ((2, 64, 4, 16), 1, 2),
    "several blocks of blocks": ((512, 100), 1, 1),
}
PLAIN = ("a stack, half a block at the end", "heads in")


@pytest.mark.parametrize(
    ("shape", "inputs", "outputs"),
    [pytest.param(*row, id=name, marks=() if name in PLAIN else pytest.mark.long) for name, row in KERNELS.items()],
)
def test_any_kernel_is_its_layers_as_matrices_of_whole_blocks(shape, inputs, outputs):
    """Bit for bit; floats are those that NumPy makes of the codes, within the rounding of a product and a sum."""
    kernel = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    first = len(shape) - inputs - outputs
    num_inputs = int(np.prod(shape[first : first + inputs]))
    one = jax.jit(lambda kernel: quantize_nf4(kernel, inputs, outputs))(kernel)
    assert one.shape == shape
    layers = kernel.reshape(-1, num_inputs, int(np.prod(shape[first + inputs :])))
    floats = np.asarray(dequantize(one, jnp.float32)).reshape(layers.shape)
    parts = {name: np.asarray(getattr(one, name)).reshape(len(layers), -1) for name in ARRAYS}
    for number, layer in enumerate(layers):
        whole = np.pad(layer, ((0, -num_inputs % 64), (0, 0)))
        alone = jax.jit(lambda kernel: quantize_nf4(kernel, 1, 1))(whole)
        wanted = {name: np.asarray(getattr(alone, name)) for name in ARRAYS}
        wanted["codes"] = wanted["codes"][: num_inputs // 2]
        for name, array in wanted.items():
            np.testing.assert_array_equal(parts[name][number], array.reshape(-1), err_msg=name)
        scales = dequantize_magnitudes(wanted["absmax"].T, wanted["nested_absmax"], wanted["offset"])
        np.testing.assert_allclose(floats[number], dequantize_rows(wanted["codes"].T, scales).T, rtol=1e-6)


def test_error_and_bytes_are_those_of_the_paper():
    """Relative error 0.0925 on Gaussian weights, and 4.127 bits per weight, counted in bytes as they are stored."""
    kernel = jax.random.normal(jax.random.key(0), (2048, 512))
    for double in (False, True):
        small = jax.jit(lambda kernel, double=double: quantize_nf4(kernel, 1, 1, double=double))(kernel)
        error = jnp.sqrt(jnp.mean((dequantize(small, jnp.float32) - kernel) ** 2) / jnp.mean(kernel**2))
        assert float(error) == pytest.approx(0.0925, abs=1e-3)
        bits = 8 * sum(leaf.nbytes for leaf in jax.tree.leaves(small)) / kernel.size
        # 32 bits of the offset are spread over all weights.
        assert bits == pytest.approx(4 + 8 / 64 + 32 / (64 * 256) if double else 4.5, abs=1e-4)


def test_an_infinite_weight_is_not_hidden():
    kernel = np.ones((64, 2), np.float32)
    kernel[3, 1] = np.inf
    assert not np.isfinite(jax.jit(lambda kernel: dequantize(quantize_nf4(kernel, 1, 1), jnp.float32))(kernel)).all()


def test_an_odd_number_of_inputs_is_refused():
    with pytest.raises(ConfigError, match=r"nf4 stores two weights per byte, and a kernel \[3, 2\] has 3 inputs"):
        quantize_nf4(jnp.ones((3, 2)), 1, 1)


MATMULS = {
    "nf4": (nf4_matmul, lambda kernel: quantize_nf4(kernel, 1, 1)),
    "int8": (int8_matmul, lambda kernel: quantize_kernel(kernel, 1, 1)),
}


@pytest.mark.parametrize(("matmul", "quantize"), MATMULS.values(), ids=MATMULS)
def test_gradients_are_those_of_the_floats(matmul, quantize):
    """Of one product in float32, in another order of sums; of no kernel; and forward over reverse."""
    kernel = jax.jit(quantize)(jax.random.normal(jax.random.key(0), (64, 12)))
    floats = jax.jit(matmul)(jnp.eye(64), kernel)
    x = jax.random.normal(jax.random.key(1), (5, 64))

    def loss(x, multiply):
        return jnp.sum(jnp.sin(multiply(x)))

    def found(x):
        return jax.grad(loss)(x, lambda x: matmul(x, kernel))

    def wanted(x):
        return jax.grad(loss)(x, lambda x: x @ floats)

    pairs = (jax.jit(lambda x, of=of: jax.jvp(of, (x,), (x,)))(x) for of in (found, wanted))
    for (one, other), tolerance in zip(zip(*pairs, strict=True), (1e-5, 1e-4), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
