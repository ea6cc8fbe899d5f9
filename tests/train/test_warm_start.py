"""A state that starts from another run: all of it, or with a new head; from arrays, a run, a folder or one step."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.train.step import TrainStep

DEGREES = {"one device": dict(data=1), "data=2,fsdp=4": dict(data=2, fsdp=4)}
INPUTS = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def batch(classes: int = 4) -> dict[str, np.ndarray]:
    return {"inputs": INPUTS, "targets": (np.arange(16) % classes).astype(np.int32)}


def model(classes: int = 4, *, width: int = 16) -> jt.Model:
    """Two layers, the inputs centred by a running mean; one key holds dots, as flat names of other libraries do."""

    def init(key: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        a, b = jax.random.split(key)
        head = {"kernel": 0.3 * jax.random.normal(b, (width, classes)), "bias": jnp.zeros(classes)}
        params = {"layers.0.weight": 0.3 * jax.random.normal(a, (8, width)), "head": head}
        return params, {"statistics": {"mean": jnp.zeros(8)}}

    def apply(params: Any, model_state: Any, inputs: jax.Array, *, key: Any, train: bool) -> Any:
        mean = 0.9 * model_state["statistics"]["mean"] + 0.1 * jnp.mean(inputs, axis=0)
        hidden = jnp.tanh((inputs - mean.astype(inputs.dtype)) @ params["layers.0.weight"])
        outputs = hidden @ params["head"]["kernel"] + params["head"]["bias"]
        return outputs, {"statistics": {"mean": mean if train else model_state["statistics"]["mean"]}}

    return jt.Model("two layers", init, apply)


def make(degrees: str = "data=2,fsdp=4", *, classes: int = 4, width: int = 16, **options: Any) -> TrainStep:
    sizes = DEGREES[degrees]
    mesh = jt.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    options = {"optimizer": optax.adam(0.05), **options}
    return jt.make_train_step(model(classes, width=width), jt.classification(), mesh=mesh, **options)


def host(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)


def same(left: Any, right: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (host(left), host(right))), strict=True))


def train(step: TrainStep, run: Path, *, steps: int = 4) -> jt.TrainState:
    """A run directory with the checkpoints of its last two steps."""
    state = step.init(0)
    with jt.Checkpointer(run / "checkpoints") as checkpointer:
        for number in range(1, steps + 1):
            state, _ = step(state, batch())
            if number > steps - 2:
                checkpointer.save(number, state, metadata={})
    return state


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jt.TrainState]:
    run = tmp_path_factory.mktemp("runs") / "pretrained"
    return run, train(make("one device"), run)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jt.TrainState]:
    run = tmp_path_factory.mktemp("runs") / "averaged"
    only_head = make("one device", ema_decay=0.9, trainable=lambda path: path.startswith("head"))
    return run, train(only_head, run)


@pytest.fixture(scope="module")
def fresh() -> TrainStep:
    return make(ema_decay=0.9)


@pytest.fixture(scope="module")
def new_head() -> TrainStep:
    return make(classes=8)


def test_a_run_is_read_into_the_shardings_of_another_mesh(trained: Any, fresh: TrainStep) -> None:
    run, last = trained
    state = fresh.init(7, jt.load_weights(fresh, str(run)))
    assert same(state.params, last.params)
    assert same(state.model_state, last.model_state)
    assert same(state.ema, last.params), "the average starts from what was read"
    assert same(state.ema_model_state, last.model_state)
    assert int(state.step) == 0
    assert same(state.optimizer_state, fresh.init(0).optimizer_state), "Adam starts from nothing"
    places = [leaf.sharding for leaf in jax.tree.leaves(state.params)]
    assert places == [leaf.sharding for leaf in jax.tree.leaves(fresh.abstract_state.params)]
    kernel = state.params["layers.0.weight"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    fresh(state, batch())
    given = fresh.init(0, params=host(last.params), model_state=host(last.model_state))
    assert same(given.model_state, last.model_state)
    newest, earlier = (fresh.init(0, jt.load_weights(fresh, run / "checkpoints" / step)) for step in ("4", "3"))
    assert same(newest.params, last.params)
    assert not same(earlier.params, last.params)
    path = "params/layers.0.weight"
    with jt.Checkpointer(run / "checkpoints", read_only=True) as checkpointer:
        found = checkpointer.read({path: fresh.abstract_state.params["layers.0.weight"]}, step=4)
    assert same(found, {path: last.params["layers.0.weight"]})
    assert found[path].sharding == kernel.sharding


def test_the_average_is_taken_where_there_is_one(averaged: Any, fresh: TrainStep) -> None:
    run, last = averaged
    state = fresh.init(7, jt.load_weights(fresh, run))
    assert same(state.params, last.evaluation_params)
    assert not same(state.params["head"], last.params["head"])
    assert same(state.model_state, last.evaluation_model_state)


def test_a_new_head_is_drawn(trained: Any, new_head: TrainStep) -> None:
    run, last = trained
    for params in (run, {"layers.0.weight": np.array(last.params["layers.0.weight"])}):
        state = new_head.init(3, jt.load_weights(new_head, params, skip=["head/*"]))
        assert same(state.params["layers.0.weight"], last.params["layers.0.weight"])
        assert same(state.params["head"], new_head.init(3).params["head"])
    state, metrics = new_head(state, batch(8))
    assert np.isfinite(metrics["loss"])


@pytest.mark.long
def test_a_run_of_another_policy_and_a_state_of_ones_own(tmp_path: Path) -> None:
    last = train(make("one device", policy="bf16_pure"), tmp_path)
    step = make("one device")
    statistics = {"statistics": {"mean": np.full(8, 2, np.float32)}}
    state = step.init(0, jt.load_weights(step, tmp_path, model_state=statistics))
    assert same(state.params, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), last.params))
    assert same(state.model_state, statistics)


def test_a_damaged_newest_step_is_passed_over(trained: Any, fresh: TrainStep, tmp_path: Path, capsys: Any) -> None:
    run, _ = trained
    shutil.copytree(run, tmp_path / "copy")
    newest = tmp_path / "copy" / "checkpoints" / "4"
    for file in (newest / "jaxtrain").iterdir():
        file.write_text("{}")
    state = fresh.init(0, jt.load_weights(fresh, tmp_path / "copy"))
    assert same(state.params, jt.load_weights(fresh, run / "checkpoints" / "3").params)
    assert "step 3 is used instead" in capsys.readouterr().err
    with pytest.raises(jt.CheckpointError, match="is damaged"):
        jt.load_weights(fresh, newest)
    assert newest.is_dir(), "reading renames nothing"


def ours(params: dict[str, Any]) -> dict[str, Any]:
    return {"layers.0.weight": np.zeros((8, 16), np.float32), "head": params}


HEAD = {"kernel": np.zeros((16, 4), np.float32), "bias": np.zeros(4, np.float32)}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no head": (dict(source=ours({})), r"head/bias is missing \(2 in all differ\).* write skip=\[\"head/\*\"\]"),
    "shape": (
        dict(source=ours({**HEAD, "bias": np.zeros(3, np.float32)})),
        r"head/bias is float32\[3\], not float32\[4\] .* write skip=\[\"head/\*\"\]",
    ),
    "pattern of nothing": (
        dict(source=ours(HEAD), skip=["hed/*"]),
        r"skip: 'hed/\*' matches no parameter; the",
    ),
    "no folder": (dict(source="runs/nothing"), r"no checkpoint at runs/nothing; give a run \(runs/<name>\)"),
}


@pytest.mark.parametrize(("given", "words"), BAD.values(), ids=BAD)
def test_what_cannot_be_a_start_is_one_line(given: dict[str, Any], words: str, fresh: TrainStep) -> None:
    with pytest.raises((jt.ConfigError, jt.CheckpointError), match=words):
        jt.load_weights(fresh, **given)


def test_a_run_with_another_head_is_one_line(trained: Any, new_head: TrainStep) -> None:
    run, _ = trained
    with pytest.raises(
        jt.ConfigError, match=r"step 4, does not fit the model of this step: head/bias is float32\[4\].*\"head/\*\""
    ):
        jt.load_weights(new_head, run)
