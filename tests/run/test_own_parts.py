"""What a run with parts from Python says of them, and of settings that they replace, before it starts."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.run.own_parts import FIT, OwnParts, own_parts, replaced_notes

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
