"""A run directory whose run came from Python: another call that computes something else is not taken for the same."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_runs import rows

import jaxtrain as jt

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(32, 4)).astype(np.float32), RNG.integers(0, 3, 32)
TABLE = np.arange(3, dtype=np.float32)


def model(scale: float = 1.0, *, spread: float = 0.1, table: np.ndarray = TABLE) -> jt.Model:
    """One layer, whose outputs read an array that they close over within a function of its own program."""
    shift = jax.jit(lambda outputs: outputs + table)
    return jt.from_functions(
        lambda key: {"w": spread * jax.random.normal(key, (4, 3)), "b": jnp.zeros(3)},
        lambda params, x: shift(scale * (x @ params["w"] + params["b"])),
        name="layer",
    )


def own_task(factor: float) -> jt.Task:
    def loss(outputs: jax.Array, batch: Any) -> jax.Array:
        return factor * optax.softmax_cross_entropy_with_integer_labels(outputs, batch["targets"])

    return jt.Task("mine", loss)


def fit(run_dir: Path, **changes: Any) -> jt.Result:
    arguments: dict[str, Any] = dict(
        model=model(),
        task=own_task(1.0),
        optimizer=optax.sgd(0.1),
        data=(X, Y),
        steps=2,
        batch_size=8,
        mesh=jt.make_mesh(devices=jax.devices()[:1]),
        run_dir=run_dir,
        logging={"every": 1, "tensorboard": False, "report": False},
    )
    arguments |= changes
    parts = [arguments.pop(part) for part in ("model", "task", "optimizer")]
    return jt.fit(*parts, **arguments)


def start(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full((4, 3), value, np.float32), "b": np.zeros(3, np.float32)}


# Calls that compute something else.
OTHERS: dict[str, dict[str, Any]] = {
    "another rate": dict(optimizer=optax.sgd(10.0)),
    "another rate and more steps": dict(optimizer=optax.sgd(10.0), steps=4),
    "a task of the same name": dict(task=own_task(5.0)),
    "a model of the same name": dict(model=model(100.0)),
    "another array that the model closes over": dict(model=model(table=TABLE + 1)),
    "other first parameters drawn": dict(model=model(spread=1.0)),
    "other parameters given": dict(params=start(1.0)),
    "other parameters trained": dict(trainable=lambda path: path != "w"),
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "run"
    fit(folder)
    return folder


def row(name: str) -> Any:
    # One row of each kind in plain pytest; each traces a program of its own.
    return pytest.param(
        OTHERS[name], id=name, marks=() if name in ("another rate", "other parameters given") else pytest.mark.long
    )


@pytest.mark.parametrize("changes", [row(name) for name in OTHERS])
def test_a_call_that_computes_something_else_is_refused(run_dir: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(jt.ConfigError, match="holds a run that computes something else") as error:
        fit(run_dir, **changes)
    assert "\n" not in str(error.value)


def test_the_same_call_goes_on_whatever_was_traced_between(run_dir: Path) -> None:
    jax.clear_caches()
    assert fit(run_dir, model=model()).step == 2
    assert fit(run_dir, steps=3, evaluation={"max_batches": 1}).step == 3


@pytest.mark.long
def test_a_change_that_is_asked_for_goes_on(tmp_path: Path) -> None:
    fit(tmp_path)
    assert fit(tmp_path, steps=3, optimizer=optax.sgd(1.0), resume="must").step == 3


@pytest.mark.long
def test_another_batch_says_nothing_of_the_parts(tmp_path: Path) -> None:
    # Equations hold the sizes of a batch, so they cannot be compared; the refusal names the setting.
    fit(tmp_path)
    words = (
        r"another configuration: train\.global_batch_size 8 -> 16, .*, where params='.*' starts from its weights, or"
    )
    with pytest.raises(jt.ConfigError, match=words):
        fit(tmp_path, batch_size=16)
    assert len(rows(tmp_path)) >= 2


@pytest.mark.long
def test_a_run_of_other_code_of_the_library_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its equations may differ by that code, whatever the version says: the parts from Python have to be trusted."""
    fit(tmp_path / "run")
    monkeypatch.setattr("jaxtrain.run.own_program.package_digest", lambda: "of another state of the library")
    assert fit(tmp_path / "run", task=own_task(5.0), steps=4).step == 4


def test_given_parameters_are_compared_by_content(tmp_path: Path) -> None:
    fit(tmp_path, params=start(0.5))
    assert fit(tmp_path, params=jax.tree.map(jnp.asarray, start(0.5))).step == 2
    with pytest.raises(jt.ConfigError, match="params="):
        fit(tmp_path, params=start(0.25))


def test_what_ran_or_was_opened_stands_for_the_path_of_its_run(tmp_path: Path) -> None:
    pretrained = tmp_path / "pretrained"
    first = fit(pretrained, checkpoint={"every": 1})
    step = jt.make_train_step(model(), own_task(1.0), optax.sgd(0.1))

    def kernel(given: Any) -> np.ndarray:
        return np.asarray(step.init(0, params=given).params["w"])

    earlier = jt.open_run(pretrained, model=model(), step=1)
    assert np.array_equal(kernel(jt.open_run(pretrained, model=model())), first.state.params["w"])
    assert np.array_equal(kernel(first), first.state.params["w"])
    assert np.array_equal(kernel(earlier), kernel(pretrained / "checkpoints" / "1"))
    assert not np.array_equal(kernel(earlier), kernel(first))
    fit(tmp_path / "run", params=str(pretrained))
    assert fit(tmp_path / "run", params=first).step == 2, "the same start"
    with pytest.raises(jt.ConfigError, match="params="):
        fit(tmp_path / "run", params=earlier)


@pytest.mark.long
def test_the_record_of_own_parts_is_enough_for_baseline_and_evaluation(tmp_path: Path) -> None:
    held_out = {"inputs": X, "targets": np.where(np.arange(32) % 4 == 0, -1, Y), "weights": np.where(Y == 0, 2.0, 1.0)}
    logging = {"every": 1, "tensorboard": False, "report": True}
    result = fit(tmp_path, task=jt.classification(), validation=held_out, data=held_out, logging=logging)
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["model"]["num_outputs"] == 3
    counted = json.loads((tmp_path / "held_out.json").read_text())
    assert [counted[key] for key in ("rows", "read", "of_rows", "has_weights")] == [24, 32, 32, True]
    assert "a uniform guess over 3 classes" in (tmp_path / "report.html").read_text()
    # The shipped task needs no task=, which one's own of the same name does.
    found = jt.open_run(tmp_path, model=model()).evaluate(jt.ArrayRows(held_out))
    assert found["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-5)  # another order of float32 sums


@pytest.mark.long
def test_an_own_task_of_a_shipped_name_is_asked_for(tmp_path: Path) -> None:
    fit(tmp_path, task=jt.Task("classification", own_task(5.0).loss))
    with pytest.raises(jt.ConfigError, match="was trained with task"):
        jt.open_run(tmp_path, model=model()).evaluate(jt.ArrayRows({"inputs": X, "targets": Y}))
