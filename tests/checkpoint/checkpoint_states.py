"""Small train states for the checkpoint tests: what optimizers keep, several dtypes, keys and empty arrays."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1)),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The fields of a train state that make trouble on disk."""

    step: Any
    params: Any
    optimizer_state: Any
    model_state: Any
    loss_scale: Any
    key: Any
    skipped: Any
    ema: Any = None
    ema_model_state: Any = None


def mesh_of(num_devices: int) -> Mesh:
    """One fsdp axis over the first devices."""
    return jax.make_mesh((num_devices,), ("fsdp",), devices=jax.devices()[:num_devices], axis_types=(AxisType.Auto,))


def shardings(state: Any, mesh: Mesh) -> Any:
    """The first dim that the mesh divides is sharded."""

    def spec(leaf: Any) -> NamedSharding:
        for dim, size in enumerate(leaf.shape):
            if size and size % mesh.size == 0 and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return NamedSharding(mesh, P(*[None] * dim, "fsdp"))
        return NamedSharding(mesh, P())

    return jax.tree.map(spec, state)


def make_state(*, optimizer: str = "adamw", mesh: Mesh | None = None, seed: int = 0, width: int = 32) -> State:
    """A state with random numbers in every array, laid out on a mesh (one device by default)."""
    return _builder(optimizer, mesh or mesh_of(1), width)(seed)


@functools.cache
def _builder(optimizer: str, mesh: Mesh, width: int) -> Any:
    def build(seed: jax.Array) -> State:
        key = jax.random.key(seed)
        params = {
            "mlp": {"kernel": jax.random.normal(key, (16, width)), "bias": jnp.zeros((width,), jnp.bfloat16)},
            "blocks": [jax.random.normal(key, (8, 16)), {"empty": {}, "scale": jnp.ones((8,))}],
        }
        moments = OPTIMIZERS[optimizer].init(params)
        moments = jax.tree.map(
            lambda leaf: leaf + jnp.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype), moments
        )
        flags, small = jnp.arange(8) % 2 == 0, jnp.arange(8, dtype=jnp.int8)
        model_state = {"unused": jnp.zeros((0, 3)), "flags": flags, "small": small}
        return State(jnp.int32(7), params, moments, model_state, None, key, jnp.int32(16_777_217))

    return jax.jit(build, out_shardings=shardings(jax.eval_shape(build, jnp.int32(0)), mesh))


def abstract(state: Any, mesh: Mesh | None = None) -> Any:
    """The target of a restore: shapes, dtypes and the shardings of another mesh."""
    layout = shardings(state, mesh) if mesh else jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), state, layout)


def raw(leaf: Any) -> np.ndarray:
    """The bits of a leaf on the host, keys included."""
    data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(data)


def assert_same(actual: Any, expected: Any) -> None:
    """Equal structure, dtypes, and every bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype
        assert raw(left).tobytes() == raw(right).tobytes()
