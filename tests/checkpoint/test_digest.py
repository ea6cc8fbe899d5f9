"""The digest is the same on the host and on devices, on every mesh, and notices every single change."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_states import mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import digest

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "int8", "int4", "uint16", "bool", "complex64"]


def numbers(dtype, shape=(8, 24)):
    values = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 8, shape) - (dtype in ("int4", "int8")) * 4
    return values.astype(getattr(ml_dtypes, dtype, None) or np.dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_on_host_and_device_and_mesh(dtype):
    values = numbers(dtype)
    expected = digest._host_digest(values)
    assert digest._device_digest(jnp.asarray(values)) == expected
    for spec in (P(), P("fsdp"), P(None, "fsdp")):
        array = jax.device_put(values, NamedSharding(mesh_of(8), spec))
        assert digest._device_digest(array) == expected
        assert digest._host_digest(array) == expected


def test_blocks_do_not_show():
    values = numbers("float32", (3, 40_000))
    assert digest._host_digest(values) == digest._device_digest(jnp.asarray(values))


def test_wide_numbers_of_the_host():
    values = np.arange(6, dtype=np.int64) * 2**40
    other = values + (np.arange(6) == 2) * 2**50
    assert digest.digests({"x": values}) != digest.digests({"x": other})


@pytest.mark.parametrize("bit", [0, 7, 12, 31])
def test_a_flipped_bit_shows(bit):
    values = numbers("float32")
    flipped = values.copy()
    flipped.view(np.uint32)[5, 7] ^= np.uint32(1 << bit)
    assert digest._host_digest(values)[0] != digest._host_digest(flipped)[0]


def test_swapped_rows_show():
    values = numbers("float32")
    assert digest._host_digest(values) != digest._host_digest(values[::-1])
