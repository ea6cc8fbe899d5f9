"""What is saved comes back bit for bit, on any mesh, in the shardings asked for; digests notice every change."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_states import abstract, assert_same, make_state, mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.checkpoint import Checkpointer, digest
from jaxtrain.checkpoint.tree import difference
from jaxtrain.errors import CheckpointError


@pytest.mark.parametrize(("optimizer", "before", "after"), [("adamw", 8, 4), ("adafactor", 1, 8)])
def test_a_state_comes_back_bit_for_bit_on_another_mesh(tmp_path, optimizer, before, after):
    state = make_state(optimizer=optimizer, mesh=mesh_of(before))
    target = abstract(state, mesh_of(after))
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        assert checkpointer.save(7, state, metadata={"data": "abc"})
        restored = checkpointer.restore(target)
        assert_same(checkpointer.restore(jax.eval_shape(lambda: state)), state)  # to the first device
        assert checkpointer.metadata() == {"data": "abc"}
    assert_same(restored, state)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    """On CPU Orbax reads the buffers in place; while it does, jax copies what would be donated."""
    state = make_state(mesh=mesh_of(8), width=4096)
    expected = jax.tree.map(lambda leaf: leaf.copy(), state)
    overwrite = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf * 2 + 1, params), donate_argnums=0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, metadata={})
        jax.block_until_ready(overwrite(state.params))
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        assert_same(checkpointer.restore(abstract(expected)), expected)


def test_only_the_parameters_are_read(tmp_path):
    state = make_state(mesh=mesh_of(8), width=4096)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, metadata={})
        checkpointer.wait()
        read = []
        opened = checkpointer._open()
        inner = opened.read
        opened.read = lambda path, wanted: read.append(sorted(wanted)) or inner(path, wanted)
        restored = checkpointer.restore(abstract(state.params, mesh_of(4)), prefix="params")
        one = checkpointer.restore(abstract(state.step), prefix="step")
        mlp = state.params["mlp"]
        for prefix in ("params/mlp", "params.mlp"):  # as printed, and as stored
            assert_same(checkpointer.restore(abstract(mlp), prefix=prefix), mlp)
    assert_same(restored, state.params)
    assert int(one) == 7
    assert read[:2] == [["params.blocks.0", "params.blocks.1.scale", "params.mlp.bias", "params.mlp.kernel"], ["step"]]


def test_names_on_disk_are_the_dotted_paths(tmp_path):
    """Any reader of Orbax checkpoints finds them without this library."""
    state = make_state()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, metadata={})
        checkpointer.wait()
        import orbax.checkpoint as ocp

        whole = ocp.PyTreeCheckpointHandler().metadata(tmp_path / "1" / "state").tree
        assert set(whole) == set(checkpointer.info(1).leaves) - {"model_state.unused"}


ON_THE_HOST = {
    "count": 2**40 + 1,
    "int64": np.arange(6, dtype=np.int64).reshape(2, 3) + 2**40,
    "complex64": np.arange(3).astype(np.complex64) * 1j,
    "big-endian int64": np.arange(3, dtype=">i8"),
}


def test_numbers_and_numpy_arrays_stay_on_the_host(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, ON_THE_HOST, metadata={})
        checkpointer.verify(1)
        restored = checkpointer.restore(ON_THE_HOST)
        assert not checkpointer.save(1, ON_THE_HOST, metadata={})
    for name, value in ON_THE_HOST.items():
        assert type(restored[name]) is type(value), name
        np.testing.assert_array_equal(restored[name], value, err_msg=name)
    assert restored["int64"].dtype == np.int64


def test_a_table_of_arrays_that_lacks_one_or_has_one_more_differs():
    saved = {"params.a": ((2,), "float32"), "params.b": ((3,), "float32")}
    assert difference(saved, dict(saved))[0] == set()
    lacking = difference({"params.a": saved["params.a"]}, saved)
    assert lacking[0] == {"params"}
    assert "params/b is not saved" in lacking[1]
    extra = difference(saved, {"params.a": saved["params.a"]})
    assert extra[0] == {"params"}
    assert "params/b" in extra[1]


def test_info_and_verify(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, make_state(), metadata={"seed": 1}, eval_loss=0.5)
        info = checkpointer.verify()
    assert (info.step, info.metadata, info.eval_loss) == (3, {"seed": 1}, 0.5)
    assert info.leaves["params.mlp.kernel"] == ((16, 32), "float32")
    assert info.leaves["key"] == ((), "key<fry>")
    assert info.leaves["model_state.unused"] == ((0, 3), "float32")
    assert info.num_bytes > 16 * 32 * 4 * 3
    assert info.versions["jax"] == jax.__version__


def test_states_that_cannot_be_saved(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for state, metadata, phrase in (
            ({"name": "text"}, {}, "name of the state is a str"),
            ({"a": {"b": 1}, "a.b": 2}, {}, r"two arrays of the state have the path a"),
        ):
            with pytest.raises(CheckpointError, match=phrase):
                checkpointer.save(1, state, metadata=metadata)


# A dtype of every width, and those whose bits are read in another way.
DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "complex64"]


def numbers(dtype, shape=(8, 24)):
    values = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 8, shape) - (dtype == "int4") * 4
    return values.astype(getattr(ml_dtypes, dtype, None) or np.dtype(dtype))


def test_a_digest_is_the_same_on_host_and_device_and_mesh():
    for dtype in DTYPES:
        values = numbers(dtype)
        expected = digest._host_digest(values)
        assert digest._device_digest(jnp.asarray(values)) == expected, dtype
        array = jax.device_put(values, NamedSharding(mesh_of(8), PartitionSpec(None, "fsdp")))
        assert digest._device_digest(array) == digest._host_digest(array) == expected, dtype
    values = numbers("float32", (3, 40_000))  # of several blocks
    assert digest._host_digest(values) == digest._device_digest(jnp.asarray(values))


def test_a_digest_notices_a_bit_a_wide_number_and_swapped_rows():
    values = numbers("float32")
    for bit in (0, 7, 12, 31):
        flipped = values.copy()
        flipped.view(np.uint32)[5, 7] ^= np.uint32(1 << bit)
        assert digest._host_digest(values)[0] != digest._host_digest(flipped)[0], bit
    assert digest._host_digest(values) != digest._host_digest(values[::-1])
    wide = np.arange(6, dtype=np.int64) * 2**40
    assert digest.digests({"x": wide}) != digest.digests({"x": wide + (np.arange(6) == 2) * 2**50})
