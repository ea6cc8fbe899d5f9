"""What is saved comes back bit for bit, on any mesh, in the shardings asked for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import OPTIMIZERS, abstract, assert_same, make_state, mesh_of
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.errors import CheckpointError


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_round_trip_of_every_optimizer(tmp_path, optimizer):
    state = make_state(optimizer=optimizer, mesh=mesh_of(8))
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        assert checkpointer.save(7, state, metadata={"data": "abc"})
        assert_same(checkpointer.restore(abstract(state)), state)
        assert checkpointer.metadata() == {"data": "abc"}


@pytest.mark.parametrize(("before", "after"), [(8, 4), (8, 1), (4, 8), (1, 8)])
def test_restore_on_another_mesh(tmp_path, before, after):
    state = make_state(mesh=mesh_of(before))
    target = abstract(state, mesh_of(after))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, metadata={})
        restored = checkpointer.restore(target)
    assert_same(restored, state)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


@pytest.mark.parametrize(("rows", "programs"), [(2 * 5 * 2**10, 0), (2 * 5 * 2**18, 2)], ids=["small", "large"])
def test_only_large_replicated_arrays_are_divided_between_devices(tmp_path, rows, programs):
    """Each part of an array costs a compiled program; parts of 5 MiB are worth it, in the same bits."""
    mesh = mesh_of(2)
    values = np.arange(rows, dtype=np.float32).reshape(2, 1, -1)
    state = {"kernel": jax.device_put(values, NamedSharding(mesh, PartitionSpec()))}
    compiled: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration_secs)

    with Checkpointer(tmp_path) as checkpointer:
        # The programs of the digest, and what else a first save needs.
        checkpointer.save(1, {"kernel": jax.device_put(values, jax.devices()[0])}, metadata={})
        checkpointer.wait()
        storage = checkpointer._open()
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            storage.write(tmp_path / "apart", {"kernel": state["kernel"]}, {})
            storage.wait()
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        assert_same(storage.read(tmp_path / "apart", abstract(state)), state)
    assert len(compiled) == programs


def test_digest_of_a_state_is_the_same_on_every_mesh(tmp_path):
    found = []
    for size in (1, 4, 8):
        with Checkpointer(tmp_path / str(size)) as checkpointer:
            checkpointer.save(1, make_state(mesh=mesh_of(size)), metadata={})
            checkpointer.wait()
            found.append(checkpointer.info(1).digests)
    assert found[0] == found[1] == found[2]


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
    assert_same(restored, state.params)
    assert int(one) == 7
    assert read == [["params.blocks.0", "params.blocks.1.scale", "params.mlp.bias", "params.mlp.kernel"], ["step"]]


@pytest.mark.parametrize("prefix", ["optimizer_state/0/mu", "optimizer_state.0.mu"], ids=["as printed", "as stored"])
def test_a_prefix_of_several_parts(tmp_path, prefix):
    state = {"optimizer_state": [{"mu": {"kernel": jnp.arange(4.0)}, "nu": {"kernel": jnp.zeros(4)}}]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, metadata={})
        found = checkpointer.restore({"kernel": jax.ShapeDtypeStruct((4,), jnp.float32)}, prefix=prefix)
    np.testing.assert_array_equal(found["kernel"], np.arange(4.0))


def test_names_on_disk_are_the_dotted_paths(tmp_path):
    """Any reader of Orbax checkpoints finds them without this library."""
    state = make_state()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, metadata={})
        checkpointer.wait()
        import orbax.checkpoint as ocp

        whole = ocp.PyTreeCheckpointHandler().metadata(tmp_path / "1" / "state").tree
        assert set(whole) == set(checkpointer.info(1).leaves) - {"model_state.unused"}


def test_numbers_and_numpy_arrays_stay_on_the_host(tmp_path):
    state = {"count": 2**40 + 1, "rate": 0.1, "on": True, "table": np.arange(6, dtype=np.int64).reshape(2, 3) + 2**40}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, metadata={})
        restored = checkpointer.restore(state)
        checkpointer.verify()
    assert (restored["count"], restored["rate"], restored["on"]) == (2**40 + 1, 0.1, True)
    assert restored["table"].dtype == np.int64
    assert (restored["table"] == state["table"]).all()


WIDE = {
    "complex128": np.arange(3) * (1 + 2j),
    "a python complex": 2.5 - 1j,
    "complex64": np.arange(3).astype(np.complex64) * 1j,
    "big-endian float32": np.arange(3, dtype=">f4"),
    "big-endian int64": np.arange(3, dtype=">i8"),
}


@pytest.mark.parametrize("leaf", WIDE.values(), ids=WIDE)
def test_wide_numbers_and_other_byte_orders(tmp_path, leaf):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": leaf}, metadata={})
        checkpointer.verify(1)
        restored = checkpointer.restore({"a": leaf})["a"]
        assert not checkpointer.save(1, {"a": leaf}, metadata={})
    assert type(restored) is type(leaf)
    np.testing.assert_array_equal(restored, leaf)


def test_a_target_without_sharding_goes_to_the_first_device(tmp_path):
    state = make_state(mesh=mesh_of(8))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, metadata={})
        restored = checkpointer.restore(jax.eval_shape(lambda: state))
    assert_same(restored, state)
    assert restored.params["mlp"]["kernel"].sharding == SingleDeviceSharding(jax.devices()[0])


def test_pinned_host_arrays(tmp_path):
    here = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    state = {"moment": jax.device_put(jnp.arange(64.0), here)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, metadata={})
        restored = checkpointer.restore(abstract(state))
    assert restored["moment"].sharding.memory_kind == "pinned_host"
    assert_same(restored, state)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_every_generator(tmp_path, implementation):
    state = {"keys": jax.random.split(jax.random.key(3, impl=implementation), 4)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, metadata={})
        restored = checkpointer.restore(abstract(state))
        checkpointer.verify(1)
    assert_same(restored, state)
    assert jax.random.key_impl(restored["keys"]) == jax.random.key_impl(state["keys"])


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


@pytest.mark.parametrize(
    ("state", "phrase"),
    [
        ({"name": "text"}, "name of the state is a str"),
        ({"a": {"b": 1}, "a.b": 2}, "two arrays of the state have the path a.b"),
    ],
    ids=["text", "collision"],
)
def test_states_that_cannot_be_saved(tmp_path, state, phrase):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError, match=phrase):
        checkpointer.save(1, state, metadata={})


def test_metadata_that_is_not_json(tmp_path):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError, match="must be JSON"):
        checkpointer.save(1, {"x": 1}, metadata={"path": tmp_path})
