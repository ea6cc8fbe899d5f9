"""What a run with parts from Python says of them, and of settings that they replace, before it starts."""

from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.data.sources.given import data_of
from jaxtrain.run.left_out import left_out_notes
from jaxtrain.run.own_parts import FIT, OwnParts, own_parts, replaced_notes
from jaxtrain.train.assemble import assemble
from jaxtrain.train.own_step import OwnStep

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(24, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
MODEL = jt.from_functions(lambda key: {"w": jnp.zeros((4, 2))}, lambda params, inputs: inputs @ params["w"])


def fit(run_dir: Path, **changes: Any) -> jt.Result:
    arguments = {"model": MODEL, "task": jt.classification(), "data": (X, Y)} | changes
    model, task = arguments.pop("model"), arguments.pop("task")
    settings: dict[str, Any] = dict(steps=1, batch_size=8, logging={"report": False, "tensorboard": False})
    return jt.fit(model, task, optax.sgd(0.1), run_dir=run_dir, **settings, **arguments)


NOTHING = own_parts(model=None, task=None, data=None)
ALL: OwnParts = {"model": "mine", "task": "brier", "data": "", "optimizer": "Sgd"}
REPLACED = {
    "nothing of one's own": (NOTHING, "model.kind task loss.z_loss data.kind optimizer.kind", []),
    "a model": (
        NOTHING | {"model": "mine"},
        "model.kind model.max_sequence_length model.from task optimizer.kind remat.policy",
        ["the model came from Python: model.kind (keyword) has no effect"],
    ),
    "a task": (
        NOTHING | {"task": "brier"},
        "task loss.z_loss loss.beta",
        ["the task came from Python: loss.z_loss (keyword), loss.beta (keyword) have no effect"],
    ),
    "all": (
        ALL,
        "model.max_sequence_length task data.kind optimizer.kind optimizer.clip_norm train.steps evaluation.every",
        [
            "the model came from Python: model.max_sequence_length (keyword) has no effect",
            "the task came from Python: task (keyword) has no effect",
            "the data came from Python: data.kind (keyword) has no effect",
            "the optimizer came from Python: optimizer.kind (keyword) has no effect",
        ],
    ),
}


@pytest.mark.parametrize("case", REPLACED)
def test_settings_of_a_part_from_python_are_named(case: str) -> None:
    own, keys, lines = REPLACED[case]
    assert replaced_notes(dict.fromkeys(keys.split(), "keyword"), own) == lines


def test_what_nobody_set_is_not_named() -> None:
    assert replaced_notes({"task": FIT, "model.embed_dim": "size gpt2"}, ALL) == []


def test_a_run_says_what_has_no_effect_and_how_rows_are_held_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = {"loss.label_smoothing": 0.1, "data.validation_fraction": 0.25, "evaluation.every": 1}
    fit(tmp_path, overrides=keys)
    shown = capfd.readouterr().err
    assert "the task came from Python: loss.label_smoothing (keyword) has no effect\n" in shown
    assert "the data came from Python: data.validation_fraction (keyword) has no effect\n" in shown
    assert "has no effect: the data has no held-out rows; give fit validation=0.1, or other rows as" in shown
    assert "data.validation_fraction=0.1" not in shown


def errors(outputs: Any, batch: Any) -> Any:
    """Losses per row."""
    return (outputs[:, 0] - batch["targets"]) ** 2, {}


def sums(outputs: Any, batch: Any) -> Any:
    """The loss weighs its rows itself, here all of them alike."""
    losses_B = errors(outputs, batch)[0]
    return jnp.sum(losses_B), jnp.float32(losses_B.size), {}


def calling(apply: Any, batch: Any, key: Any) -> Any:
    return errors(apply(batch["inputs"]), batch)


def rows_of(targets: np.ndarray) -> grain.MapDataset:
    return grain.MapDataset.source([{"inputs": x, "targets": y} for x, y in zip(X, targets, strict=True)])


DEGREES = np.arange(24) - 6
MSE = jt.Task("mse", errors)
FLOATS = "give floats to count them: targets.astype(np.float32)"
LEFT_OUT = {
    "arrays": (MSE, lambda: (X, DEGREES), "6 of 24 targets are"),
    "a share of arrays": (MSE, lambda: data_of((X, DEGREES), validation=0.25), "of 18 targets are"),
    "grain rows": (MSE, lambda: rows_of(DEGREES), "6 of 24 targets are"),
    "many grain rows": (MSE, lambda: rows_of(DEGREES).repeat(100), "of the first 256 targets are"),
    "batches": (MSE, lambda: [(X[:8], DEGREES[:8])].__iter__(), "6 of 8 targets in the first batch are"),
    "a task that calls the model": (jt.Task.calling("mse", calling), lambda: (X, DEGREES), "6 of 24 targets are"),
    "marks of both kinds": (MSE, lambda: (X, np.where(DEGREES < -4, -100, np.maximum(DEGREES, -1))), "6 of 24"),
    "floats": (MSE, lambda: (X, DEGREES.astype(np.float32)), None),
    "none below 0": (MSE, lambda: (X, abs(DEGREES)), None),
    "unsigned": (MSE, lambda: (X, abs(DEGREES).astype(np.uint8)), None),
    "-100 alone": (MSE, lambda: (X, np.where(DEGREES < 0, -100, DEGREES)), None),
    "-1 alone": (MSE, lambda: (X, np.maximum(DEGREES, -1)), None),
    "no targets": (jt.Task("norm", lambda outputs, batch: (outputs[:, 0] ** 2, {})), lambda: {"inputs": X}, None),
    "losses of another shape": (
        jt.Task("all", lambda outputs, batch: ((outputs - batch["targets"][:, None]) ** 2, {})),
        lambda: (X, DEGREES),
        None,
    ),
    "sums": (jt.Task("sums", sums), lambda: (X, DEGREES), None),
    "a shipped task": (jt.regression(), lambda: (X, DEGREES), None),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_rows_that_losses_leave_out_are_counted(case: str) -> None:
    task, make, words = LEFT_OUT[case]
    own_step = OwnStep(optimizer=optax.sgd(0.1), mesh=jt.make_mesh(devices=jax.devices()[:1]))
    config = jt.load_config({"train.global_batch_size": 8}).config
    run = assemble(config, data_of(make()), model=MODEL, task=task, own=own_step)
    notes = left_out_notes(run)
    assert len(notes) == (words is not None)
    for note in notes:
        assert words in note
        assert FLOATS in note


def test_a_run_says_that_it_leaves_rows_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, task=MSE, data=(X, DEGREES))
    said = "6 of 24 targets are integers below 0, which losses per row leave out (task 'mse'); "
    assert f"{said}{FLOATS}\n" in capfd.readouterr().err
