"""Keys whose hashes are written out draw what jax's own keys draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.initializers import normal
from jaxtrain.models.unrolled_keys import unrolled


def drawn(key):
    """Everything that an initializer may ask of a key, in one program."""
    inner = jax.random.split(jax.random.fold_in(key, 5), (2, 3))
    return {
        "fold_in and split": jax.random.key_data(inner),
        "bits": jax.random.bits(key, (5, 7, 3)),
        "one number": jax.random.bits(key, ()),
        "of stacked layers": jax.vmap(lambda key: normal(1.0)(key, (3, 4), jnp.float32))(inner[0]),
        "16 bits": jax.random.bits(key, (4,), jnp.uint16),
        "jax's normal": jax.random.normal(key, (4,)),
    }


@pytest.mark.parametrize("seed", [0, pytest.param(2**31 + 7, marks=pytest.mark.long)])
def test_the_numbers_are_those_of_threefry_keys(seed):
    key = jax.random.key(np.uint32(seed))
    assert unrolled(key).dtype != key.dtype, "this test compares two forms"
    jax.tree.map(np.testing.assert_array_equal, jax.jit(drawn)(unrolled(key)), jax.jit(drawn)(key))


def test_a_key_of_another_kind_is_left_as_it_is():
    key = jax.random.key(0, impl="rbg")
    assert unrolled(key).dtype == key.dtype
