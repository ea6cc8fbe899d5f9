"""States, parameters and batches that a user gives: donated ones, NumPy ones, wrong ones, and loaded parameters."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax.core import freeze

import jaxtrain as jt
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.train.step import TrainStep

MESHES = {"one device": dict(data=1), "eight devices": dict(data=2, fsdp=4)}
BATCH = {
    "inputs": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32),
    "targets": (np.arange(16) % 4).astype(np.int32),
}


def make(degrees: dict[str, int] | None = None, *, model: jt.Model | None = None, **options: Any) -> TrainStep:
    degrees = degrees or MESHES["eight devices"]
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


@pytest.mark.parametrize("degrees", MESHES.values(), ids=MESHES)
def test_a_state_that_was_donated_is_one_line(tmp_path: Path, degrees: dict[str, int]) -> None:
    """On several devices the buffers that are gone would end the process."""
    step = make(degrees)
    first = step.init(0)
    second, _ = step(first, BATCH)
    for use in (lambda: step(first, BATCH), lambda: jt.Evaluator(step)(first, [BATCH])):
        with pytest.raises(
            jt.ConfigError, match=r"given to an earlier step.*state, metrics = step\(state, batch\)"
        ) as e:
            use()
        assert "\n" not in str(e.value)
    with (
        jt.Checkpointer(tmp_path / "checkpoints") as checkpointer,
        pytest.raises(jt.CheckpointError, match=r"is deleted.*state, metrics = step\(state, batch\)"),
    ):
        checkpointer.save(1, first, metadata={})
    assert not (tmp_path / "checkpoints").exists()
    # What the step returned is as good as ever.
    third, _ = step(second, BATCH)
    assert int(third.step) == 2
    with pytest.raises(jt.ConfigError, match="given to an earlier step"):
        step(second, BATCH)


def test_text_from_donated_parameters_is_one_line() -> None:
    config = jt.load_config(
        {"model": dict(kind="transformer", num_layers=1, embed_dim=16, num_heads=2, max_sequence_length=16)}
    ).config
    step = make(model=jt.build_model(config.model, input_shape=(16,), vocab_size=256))
    state = step.init(0)
    jax.tree.map(lambda leaf: leaf.delete(), state.params)
    with pytest.raises(jt.ConfigError, match="given to an earlier step"):
        jt.generate_text(step, state.params, ByteTokenizer(), ["a"], new_tokens=2, sampling=jt.Sampling(temperature=0))


def test_a_batch_that_is_gone_is_one_line() -> None:
    step = make()
    batch = jax.device_put(BATCH, step.batch_shardings(BATCH))
    state, _ = step(step.init(0), batch)
    batch["targets"].delete()
    for use in (lambda: step(state, batch), lambda: jt.Evaluator(step)(state, [batch])):
        with pytest.raises(jt.ConfigError, match="targets of the batch is deleted"):
            use()
    assert int(step(state, BATCH)[0].step) == 2, "the state is not taken over by a call that is refused"


def twice(state: jt.TrainState) -> jt.TrainState:
    return dataclasses.replace(state, params={name: state.params["first"] for name in state.params})


def average_is_the_parameters(state: jt.TrainState) -> jt.TrainState:
    return dataclasses.replace(state, ema=state.params)


def two_objects_on_one_buffer(state: jt.TrainState) -> jt.TrainState:
    array = state.params["first"]
    parts = [shard.data for shard in array.addressable_shards]
    other = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
    return dataclasses.replace(state, params={"first": array, "second": other})


@pytest.mark.parametrize("change", [twice, average_is_the_parameters, two_objects_on_one_buffer])
def test_one_array_at_two_places_is_one_line(change: Any) -> None:
    step = make(ema_decay=0.9 if change is average_is_the_parameters else None)
    with pytest.raises(
        jt.ConfigError, match=r"params/\w+ and (params|ema)/\w+ of the state are the same array.*jnp\.copy"
    ):
        step(change(step.init(0)), BATCH)


def on_one_device(leaf: Any) -> Any:
    return jax.device_put(np.array(leaf), jax.devices()[0])


def replicated(leaf: Any) -> Any:
    mesh = jt.make_mesh(data=8)
    return jax.device_put(np.array(leaf), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


@pytest.mark.parametrize("ahead", [False, True], ids=["compiled on the way", "compiled ahead"])
@pytest.mark.parametrize("move", [np.array, on_one_device, replicated], ids=["numpy", "one device", "replicated"])
def test_parameters_from_anywhere_are_placed_and_stay_the_users(move: Any, ahead: bool) -> None:
    step = make()
    if ahead:
        step.compile(BATCH)
    expected, _ = step(step.init(0), BATCH)
    state = step.init(0)
    given = jax.tree.map(move, state.params)
    before = host(given)
    after, _ = step(dataclasses.replace(state, params=given), BATCH)
    after, _ = step(after, BATCH)
    expected, _ = step(expected, BATCH)
    assert same(after, expected)
    assert after.params["first"].sharding == step.state_shardings.params["first"]
    assert same(given, before), "the step took over arrays that are the user's"


def test_a_whole_state_of_numpy_arrays_in_other_containers() -> None:
    """As another library restores it: keys aside, NumPy arrays, lists for tuples, numbers for scalars."""
    step = make(ema_decay=0.5)
    expected, _ = step(step.init(0), BATCH)
    state = step.init(0)
    given = jax.tree.map(
        lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.array(leaf), state
    )
    moments = list(given.optimizer_state)
    given = dataclasses.replace(given, step=0, params=freeze(given.params), optimizer_state=moments)
    after, _ = step(given, BATCH)
    assert same(after, expected)
    assert jax.tree.structure(after) == jax.tree.structure(expected)


WRONG = np.zeros((8, 3), np.float32)
REFUSED = {
    "shape": (lambda p: {**p, "second": WRONG}, r"params/second is float32\[8, 3\], wanted is float32\[8, 8\]"),
    "dtype": (lambda p: {**p, "second": np.zeros((8, 8))}, r"params/second is float64\[8, 8\]"),
    "missing": (lambda p: {"first": p["first"]}, "params/second is missing"),
    "too much": (lambda p: {**p, "third": p["first"]}, "params/third is not an array of it"),
    "renamed": (lambda p: {"first": p["first"], "two": p["second"]}, r"params/second is missing \(1 missing, 1 too"),
    "text": (lambda p: {**p, "second": "zeros"}, "holds a str at params/second"),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_other_parameters_are_refused_by_the_first_path(change: Any, words: str) -> None:
    step = make()
    state = step.init(0)
    with pytest.raises(jt.ConfigError, match=words) as caught:
        step(dataclasses.replace(state, params=change(host(state.params))), BATCH)
    assert "\n" not in str(caught.value)
    with pytest.raises(jt.ConfigError, match=words.replace("params/", "")):
        step.init(0, params=change(host(state.params)))
    step(state, BATCH)


def test_what_is_no_state_is_refused() -> None:
    step = make()
    with pytest.raises(jt.ConfigError, match=r"takes a TrainState, and was given a dict; make one with step\.init"):
        step(step.init(0).params, BATCH)


def test_numpy_arrays_and_numbers_from_an_init_function() -> None:
    def init(key: jax.Array) -> dict[str, Any]:
        return {"kernel": np.full((8, 4), 0.1, np.float32), "bias": np.zeros(4), "scale": 1.0}

    model = jt.from_functions(init, lambda p, x: (x @ p["kernel"] + p["bias"]) * p["scale"])
    step = make(dict(data=8), model=model)
    step.compile(BATCH)
    state = step.init(0)
    for _ in range(3):
        state, metrics = step(state, BATCH)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    assert float(metrics["loss"]) > 0
    assert float(state.params["scale"]) != 1.0


def trained() -> dict[str, np.ndarray]:
    """Parameters that classify BATCH well."""
    step = make(optimizer=optax.adam(0.05))
    state = step.init(3)
    for _ in range(120):
        state, _ = step(state, BATCH)
    return host(state.params)


OPTIMIZERS = {"adam": optax.adam(1e-3), "copies of the parameters": optax.contrib.schedule_free_sgd(1e-3)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_loaded_parameters_set_average_and_optimizer_state(optimizer: Any, kind: str) -> None:
    loaded: Any = trained()
    step = make(optimizer=optimizer, ema_decay=0.99)
    if kind == "jax":
        loaded = jax.device_put(loaded, step.state_shardings.params)
    state = step.init(0, params=loaded)
    assert same(state.params, loaded)
    assert same(state.ema, loaded)
    assert same(state.optimizer_state, step.optimizer.init(jax.tree.map(jnp.asarray, host(loaded))))
    assert same(state.key, step.init(0).key)
    before = host(loaded)
    assert jt.Evaluator(step)(state, [BATCH])["eval_accuracy"] > 0.9
    for _ in range(2):
        state, _ = step(state, BATCH)
    assert jt.Evaluator(step)(state, [BATCH])["eval_accuracy"] > 0.9
    assert same(loaded, before), "the step took over the arrays that were loaded"


def test_replacing_parameters_alone_is_refused() -> None:
    loaded = trained()
    average, copies = make(ema_decay=0.99), make(optimizer=OPTIMIZERS["copies of the parameters"])
    for step, words in ((average, "moving average"), (copies, "optimizer state holds copies")):
        state = step.init(0)
        stale = dataclasses.replace(state, params=loaded)
        with pytest.raises(jt.ConfigError, match=rf"{words}.* step\.init\(seed, params=params\)"):
            step(stale, BATCH)
    state = average.init(0)
    with pytest.raises(jt.ConfigError, match="moving average"):
        jt.Evaluator(average)(dataclasses.replace(state, params=loaded), [BATCH])
    # Replaced together, and where nothing is copied from the parameters, it is what was asked for.
    average(dataclasses.replace(state, params=loaded, ema=loaded), BATCH)
    plain = make()
    plain(dataclasses.replace(plain.init(0), params=loaded), BATCH)


def test_parameters_may_change_while_an_average_is_kept() -> None:
    """Clipped after every step, say: the average of what was trained is wanted."""
    step = make(ema_decay=0.9)
    state, _ = step(step.init(0), BATCH)
    clipped = jax.tree.map(lambda leaf: jnp.clip(leaf, -0.1, 0.1), state.params)
    state, _ = step(dataclasses.replace(state, params=clipped), BATCH)
    assert int(state.step) == 2


def test_frozen_and_half_precision_parameters_are_loaded() -> None:
    loaded = trained()
    step = make(policy="bf16_pure", ema_decay=0.9, trainable=lambda path: path == "first")
    state = step.init(0, params=loaded)
    assert {name: leaf.dtype.name for name, leaf in state.params.items()} == {"first": "bfloat16", "second": "float32"}
    assert same(state.ema["first"], loaded["first"])
    assert same(state.params["second"], loaded["second"])


def test_model_state_is_loaded_too() -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            return linen.Dense(4)(linen.BatchNorm(use_running_average=not train)(x))

    step = make(model=jt.from_linen(Net(), BATCH["inputs"]))
    state = step.init(1)
    for _ in range(3):
        state, _ = step(state, BATCH)
    params, statistics = host((state.params, state.model_state))
    again = step.init(0, params=params, model_state=statistics)
    assert jt.Evaluator(step)(again, [BATCH]) == jt.Evaluator(step)(state, [BATCH])
    with pytest.raises(jt.ConfigError, match=r"model_state does not fit .*batch_stats/.* is missing"):
        step.init(0, params=params, model_state={})
