"""What waits for what on emulated devices, and the reader of programs that finds exchanges that do not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from program_text import unordered

from jaxtrain.layout.manual import after
from jaxtrain.layout.mesh import make_mesh


def around(x: jax.Array, times: jax.Array) -> jax.Array:
    return jax.lax.while_loop(
        lambda state: state[0] < times, lambda state: (state[0] + 1, jax.lax.psum(state[1], "data") / 3), (0, x)
    )[1]


def at_once(x: jax.Array, times: jax.Array) -> jax.Array:
    return around(x, times) + jax.lax.psum(jnp.sin(x), "data")


def in_turn(x: jax.Array, times: jax.Array) -> jax.Array:
    first = around(x, times)
    return first + jax.lax.psum(jnp.sin(after(x, first)), "data")


def in_branches(x: jax.Array, times: jax.Array) -> jax.Array:
    one, other = (
        jax.lax.cond(times > bound, lambda x: jax.lax.psum(x, "data"), lambda x: 2 * x, x * bound) for bound in (1, 2)
    )
    return one + other


def plain(x: jax.Array, times: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "data") + jnp.cos(jax.lax.psum(jnp.sin(x), "data"))


def compiled(function: Any) -> Any:
    mesh = make_mesh(data=2, devices=jax.devices()[:2])
    spec = PartitionSpec("data")
    entered = jax.shard_map(
        function, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, axis_names={"data"}, check_vma=False
    )
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, spec))
    return jax.jit(entered).lower(x, jax.ShapeDtypeStruct((), jnp.int32)).compile()


@pytest.mark.parametrize(
    ("function", "count"), [(at_once, 1), (in_turn, 0), (in_branches, 1), (plain, 0)], ids=lambda f: str(f)[:16]
)
def test_the_reader_finds_what_may_run_at_once(function: Any, count: int) -> None:
    assert len(unordered(compiled(function).as_text())) == count


def test_whatever_is_waited_for_arrays_are_as_they_were() -> None:
    tree, wait = {"floats": jnp.array([np.nan, -0.0, np.inf]), "key": jax.random.key(3)}, jax.jit(after)
    for done in (np.nan, -np.inf, 3.0):
        found = wait(tree, jnp.array([[done]]))
        assert np.asarray(found["floats"]).tobytes() == np.asarray(tree["floats"]).tobytes()
        assert (jax.random.key_data(found["key"]) == jax.random.key_data(tree["key"])).all()
