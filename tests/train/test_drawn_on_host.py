"""States at step 0 that are evaluated on the host have the bits of the compiled program."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.models.initializers import normal
from jaxtrain.runtime.tree import paths_of
from jaxtrain.train.first_state import FirstState

# The embedding of 270,000 numbers takes more than one block.
TRANSFORMER = {"kind": "transformer", "embed_dim": 64, "num_heads": 2, "mlp_dim": 32, "num_layers": 2}
RESNET = {"kind": "resnet", "stage_blocks": [3], "width": 4, "stem": "small"}
MLP = {"kind": "mlp", "hidden_dims": [8, 8]}
CASES = [
    pytest.param(
        RESNET,
        jt.classification(),
        {"optimizer": optax.adafactor(1e-3), "policy": "fp16", "mesh": {"data": 4}},
        id="keys written out, a loss scale, a copy on each device",
    ),
    pytest.param(
        {**TRANSFORMER, "experts": {"num_experts": 2}},
        jt.language_modeling(),
        {
            "optimizer": optax.adamw(1e-3),
            "ema_decay": 0.9,
            "mesh": {"pipe": 2, "data": 2, "tensor": 2},
            "parallelism": jt.Parallelism(zero=1),
        },
        id="stages, shards, experts, averages",
    ),
]


def step_of(
    model: jt.Model, task: jt.Task, *, mesh: Mapping[str, int] = MappingProxyType({"data": 1}), **options: Any
) -> jt.TrainStep:
    devices = jax.devices()[: math.prod(mesh.values())]
    return jt.make_train_step(model, task, mesh=jt.make_mesh(**mesh, devices=devices), **options)


def built(group: dict[str, Any]) -> jt.Model:
    if group["kind"] == "transformer":
        return jt.build_model(group, input_shape=(16,), vocab_size=4220)
    return jt.build_model(group, input_shape=(8, 8, 3), num_outputs=10)


def bits(tree: Any) -> dict[str, Any]:
    def one(leaf: jax.Array) -> tuple[Any, ...]:
        plain = jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        shards = [(shard.device, shard.index, np.asarray(shard.data).tobytes()) for shard in plain.addressable_shards]
        return leaf.shape, leaf.dtype, leaf.sharding, shards

    return {path: one(leaf) for path, leaf in paths_of(tree).items()}


@pytest.mark.parametrize(("group", "task", "options"), CASES)
def test_bits_are_those_of_the_program(
    group: dict[str, Any], task: jt.Task, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(built(group), task, **options)
    expected = step._first_state.jitted(frozenset())(jax.random.key(2**31 + 7), params=None, model_state=None)
    monkeypatch.setattr(FirstState, "jitted", None)  # nothing is to be compiled
    found = step.init(jax.random.key(2**31 + 7))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert bits(found) == bits(expected)


def test_arrays_of_the_host_are_copied() -> None:
    """Else the first step could not reuse the memory of the state, or four devices would write to one array."""
    mesh = {"data": 4}
    step = step_of(built(MLP), jt.classification(), optimizer=optax.sgd(0.1, momentum=0.9), mesh=mesh)
    state = step.init(0)
    arrays = [leaf for leaf in jax.tree.leaves((state.params, state.optimizer_state)) if leaf.size > 1]
    places = [shard.data.unsafe_buffer_pointer() for leaf in arrays for shard in leaf.addressable_shards]
    assert len(set(places)) == len(places)
    rows = {"inputs": np.zeros((4, 8, 8, 3), np.float32), "targets": np.zeros(4, np.int32)}
    step(state, rows)
    assert arrays[0].is_deleted()


OWN_KEY, OTHER_KEY = jax.random.key(7), jax.random.key(7, impl="rbg")


@jax.jit
def exact_normal(key: jax.Array, scale: float) -> jax.Array:
    """A user's function with a name that could be ours."""
    return jax.random.normal(key, (4, 3)) * scale


def drawn_along(axes: int, keys: jax.Array) -> jax.Array:
    return jax.vmap(jax.vmap(lambda key: normal(0.1)(key, (3,), jnp.float32)), in_axes=axes)(keys)


OWN_DRAWS = {
    "a key of its own": lambda key: normal(0.1)(jax.random.fold_in(OWN_KEY, 3), (4, 3), jnp.float32),
    "a key of another kind": lambda key: normal(0.1)(OTHER_KEY, (4, 3), jnp.float32),
    "a function of one name": lambda key: exact_normal(key, 2.0),
    "keys in another order": lambda key: drawn_along(1, jax.random.split(key, (3, 3))),
    "keys in rows": lambda key: drawn_along(0, jax.random.split(key, (2, 3))),
}


def test_own_models_have_the_bits_of_the_program() -> None:
    """Each in a state of its own, as one that cannot be followed has all of them compiled."""
    key = jax.random.key(5)
    for name, draw in OWN_DRAWS.items():
        model = jt.from_functions(lambda key, draw=draw: {"w": draw(key)}, lambda params, inputs: inputs)
        step = step_of(model, jt.regression(), optimizer=optax.sgd(0.1))
        program = step._first_state.jitted(frozenset())
        assert bits(step.init(key)) == bits(program(key, params=None, model_state=None)), name


def test_where_a_seed_has_no_numbers_yet_and_where_transfers_are_refused() -> None:
    step = step_of(built(MLP), jt.classification(), optimizer=optax.sgd(0.1))
    key = jax.random.key(0)
    shapes = jax.eval_shape(step.init, key)
    with jax.transfer_guard("disallow"):
        states = [step.init(seed) for seed in (key, 0)]
    assert [jax.tree.map(jnp.shape, state) for state in states] == [jax.tree.map(jnp.shape, shapes)] * 2
