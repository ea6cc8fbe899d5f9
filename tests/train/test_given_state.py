"""States, parameters and batches that a user gives: donated ones, NumPy ones, wrong ones, and loaded parameters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze

import jaxtrain as jt
from jaxtrain.train.step import TrainStep

BATCH = {
    "inputs": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32),
    "targets": (np.arange(16) % 4).astype(np.int32),
}


def make(degrees: dict[str, int] | None = None, *, model: jt.Model | None = None, **options: Any) -> TrainStep:
    degrees = degrees or dict(data=2, fsdp=4)
    mesh = jt.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
    options = {"optimizer": optax.adam(1e-2), **options}
    return jt.make_train_step(model or two_layers(), jt.classification(), mesh=mesh, **options)


def two_layers() -> jt.Model:
    def init(key: jax.Array) -> dict[str, Any]:
        a, b = jax.random.split(key)
        return {"first": 0.3 * jax.random.normal(a, (8, 8)), "second": 0.3 * jax.random.normal(b, (8, 8))}

    return jt.from_functions(init, lambda params, x: x @ params["first"] @ params["second"])


def host(tree: Any) -> Any:
    """NumPy arrays; the numbers of random keys."""

    def fetch(leaf: Any) -> np.ndarray:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(leaf) if is_key else leaf)

    return jax.tree.map(fetch, tree)


def same(left: Any, right: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (host(left), host(right))), strict=True))


@pytest.fixture(scope="module")
def step() -> TrainStep:
    """On eight devices; its program is compiled on the first call."""
    return make()


@pytest.fixture(scope="module")
def averaged() -> TrainStep:
    return make(ema_decay=0.99)


def test_a_state_that_was_donated_is_one_line(step: TrainStep) -> None:
    """On several devices the buffers that are gone would end the process."""
    first = step.init(0)
    second, _ = step(first, BATCH)
    for use in (
        lambda: step(first, BATCH),
        lambda: jt.Evaluator(step)(first, [BATCH]),
    ):
        with pytest.raises(jt.ConfigError, match=r"given to an earlier step.*state, metrics = step\(state, batch\)"):
            use()
    # What the step returned is as good as ever.
    assert int(step(second, BATCH)[0].step) == 2


def on_one_device(leaf: Any) -> Any:
    return jax.device_put(np.array(leaf), jax.devices()[0])


def replicated(leaf: Any) -> Any:
    mesh = jt.make_mesh(data=8)
    return jax.device_put(np.array(leaf), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def test_parameters_from_anywhere_are_placed_and_stay_the_users(step: TrainStep) -> None:
    ahead = make()
    ahead.compile(BATCH)
    expected, _ = step(step.init(0), BATCH)
    expected, _ = step(expected, BATCH)
    for one in (step, ahead):
        for move in (np.array, on_one_device, replicated):
            state = one.init(0)
            given = jax.tree.map(move, state.params)
            before = host(given)
            after, _ = one(dataclasses.replace(state, params=given), BATCH)
            after, _ = one(after, BATCH)
            assert same(after, expected)
            assert after.params["first"].sharding == one.state_shardings.params["first"]
            assert same(given, before), "the step took over arrays that are the user's"


def test_a_whole_state_of_numpy_arrays_in_other_containers(averaged: TrainStep) -> None:
    """As another library restores it: keys aside, NumPy arrays, lists for tuples, numbers for scalars."""
    expected, _ = averaged(averaged.init(0), BATCH)
    state = averaged.init(0)
    given = jax.tree.map(
        lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.array(leaf), state
    )
    moments = list(given.optimizer_state)
    given = dataclasses.replace(given, step=0, params=freeze(given.params), optimizer_state=moments)
    after, _ = averaged(given, BATCH)
    assert same(after, expected)
    assert jax.tree.structure(after) == jax.tree.structure(expected)


def test_other_parameters_are_refused_by_the_first_path(step: TrainStep) -> None:
    state = step.init(0)
    wrong = {**host(state.params), "second": np.zeros((8, 3), np.float32)}
    words = r"second is float32\[8, 3\], not float32\[8, 8\]"
    with pytest.raises(jt.ConfigError, match=words):
        step.init(0, params=wrong)
    step(state, BATCH)


@pytest.fixture(scope="module")
def trained() -> dict[str, np.ndarray]:
    """Parameters that classify BATCH well."""
    step = make(optimizer=optax.adam(0.05))
    state = step.init(3)
    for _ in range(120):
        state, _ = step(state, BATCH)
    return host(state.params)


OPTIMIZERS = {"adam": optax.adam(1e-3), "copies of the parameters": optax.contrib.schedule_free_sgd(1e-3)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_loaded_parameters_set_average_and_optimizer_state(optimizer: Any, trained: Any) -> None:
    step = make(optimizer=optimizer, ema_decay=0.99)
    for loaded in (trained, jax.device_put(trained, step.state_shardings.params)):
        state = step.init(0, params=loaded)
        assert same(state.params, trained)
        assert same(state.ema, trained)
        assert same(state.optimizer_state, step.optimizer.init(jax.tree.map(jnp.asarray, trained)))
        assert same(state.key, step.init(0).key)
        for _ in range(2):
            state, _ = step(state, BATCH)
        assert jt.Evaluator(step)(state, [BATCH])["eval_accuracy"] > 0.9
        assert same(loaded, trained), "the step took over the arrays that were loaded"


def test_frozen_and_half_precision_parameters_are_loaded(trained: Any) -> None:
    step = make(policy="bf16_pure", ema_decay=0.9, trainable=lambda path: path == "first")
    state = step.init(0, params=trained)
    assert {name: leaf.dtype.name for name, leaf in state.params.items()} == {"first": "bfloat16", "second": "float32"}
    assert same(state.ema["first"], trained["first"])
    assert same(state.params["second"], trained["second"])


def test_a_mesh_of_the_degrees_of_parallelism_and_one_that_contradicts_them() -> None:
    options = jt.Parallelism(fsdp=4, max_replicated_fraction=1.0)
    built = jt.make_train_step(two_layers(), jt.classification(), optax.sgd(0.1), parallelism=options)
    assert (built.mesh.shape["data"], built.mesh.shape["fsdp"]) == (2, 4)
    with pytest.raises(jt.ConfigError, match=r"parallel\.fsdp=4, but the mesh has fsdp=1; leave fsdp out"):
        make(dict(data=8), parallelism=options)
    with pytest.raises(jt.ConfigError, match=r"parallel\.auto lets the planner"):
        make(parallelism=jt.Parallelism(auto=True))


def test_single_parameters_are_drawn_and_what_is_not_a_tree_is_one_line(step: TrainStep, trained: Any) -> None:
    state = step.init(0, params={**trained, "second": None})
    assert same(state.params, {"first": trained["first"], "second": step.init(0).params["second"]})
    with pytest.raises(
        jt.ConfigError, match=r'not a path; write step\.init\(seed, jt\.load_weights\(step, "runs/x"\)\)'
    ):
        step.init(0, params="runs/x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(jt.ConfigError, match="init takes weights, or params and model_state"):
        step.init(0, jt.load_weights(step, trained), params=trained)
