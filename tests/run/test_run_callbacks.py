"""What happens between the steps: callbacks and what they may do, an optimizer from Python."""

import base64
import io
import json
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image
from tensorboard_events import read_events
from test_fit import digests, fit
from training_runs import losses, rows

import jaxtrain as jt

DIGITS = {
    "task": "classification",
    "model": {"kind": "mlp", "hidden_dims": [16]},
    "data": {"kind": "digits"},
    "optimizer": {"kind": "adamw"},
    "train": {"steps": 6, "global_batch_size": 16},
    "evaluation": {"every": 1, "max_batches": 1},
    "logging": {"every": 1, "tensorboard": False, "report": False},
}


def status(run_dir: Path) -> str:
    return json.loads((run_dir / "run.json").read_text())["status"]


def kept(run_dir: Path) -> set[int]:
    return {int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal()}


def test_callbacks_see_the_run(tmp_path: Path) -> None:
    seen: list[Any] = []

    def step(moment: jt.Moment) -> None:
        seen.append(("step", moment.step, moment.metrics["loss"], int(moment.state.step)))

    fit(
        tmp_path,
        validation=0.25,
        steps=5,
        evaluation={"every": 2},
        checkpoint={"every": 4},
        callbacks=[
            jt.Callback(on_step=step, every=2),
            jt.Callback(on_evaluation=lambda moment: seen.append(("evaluation", moment.step, sorted(moment.metrics)))),
        ],
    )
    loss = losses(tmp_path)
    names = ["eval_accuracy", "eval_loss"]
    assert seen == [
        ("step", 2, loss[2], 2),
        ("evaluation", 2, names),
        ("step", 4, loss[4], 4),
        ("evaluation", 4, names),
        ("step", 5, loss[5], 5),
        ("evaluation", 5, names),
    ]


def test_a_callback_stops_a_run_and_the_same_call_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stop = jt.Callback(on_step=lambda moment: "stop" if moment.step == 3 else None)
    fit(tmp_path / "whole", validation=0.25)
    result = fit(tmp_path / "run", validation=0.25, callbacks=[stop])
    assert (result.step, status(tmp_path / "run")) == (3, "stopped by a callback")
    assert "eval_loss" in result.metrics
    assert kept(tmp_path / "run") == {3}
    assert "stopped by a callback before step 6" in capfd.readouterr().out
    assert fit(tmp_path / "run", validation=0.25, callbacks=[stop]).step == 6
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert digests(tmp_path / "run", 6) == digests(tmp_path / "whole", 6)


def test_the_last_step_of_a_run_that_stops_early_is_logged(tmp_path: Path) -> None:
    """The result had the loss of step 1, under the number 1, beside the evaluation of step 4."""
    seen: dict[int, float] = {}
    stop = jt.Callback(on_evaluation=lambda moment: "stop" if moment.step == 4 else None)
    watch = jt.Callback(on_step=lambda moment: seen.update({moment.step: moment.metrics["loss"]}))
    quiet = {"every": 10, "tensorboard": False, "report": False}
    result = fit(tmp_path, validation=0.25, evaluation={"every": 2}, logging=quiet, callbacks=[watch, stop])
    mean = statistics.fmean(seen[step] for step in (2, 3, 4))
    assert (result.step, result.metrics["step"], result.metrics["loss"]) == (4, 4, mean)
    assert losses(tmp_path) == {1: seen[1], 4: mean}


def test_an_error_in_a_callback_is_raised_once_the_state_is_saved(tmp_path: Path) -> None:
    def fail(moment: jt.Moment) -> None:
        if moment.step == 3:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fit(tmp_path, callbacks=[jt.Callback(on_step=fail)])
    assert (status(tmp_path), kept(tmp_path)) == ("failed", {3})
    assert fit(tmp_path).step == 6


WRONG_SETTINGS = {
    "no evaluation": ({"evaluation.every": None, "evaluation.early_stopping": {}}, "stopping needs evaluations"),
    "a key": ({"evaluation.early_stopping": {"patiense": 2}}, "early_stopping.patiense'.*early_stopping.patience"),
    "a metric": (
        {"evaluation.early_stopping.metric": "eval_f1"},
        "eval_f1 is not among .*use eval_accuracy or eval_loss",
    ),
    "a direction": (
        {"evaluation.early_stopping.metric": "eval_gain"},
        "metric=eval_gain are better is not known; set mode=max or mode=min",
    ),
    "no rows": ({"data.validation_fraction": 0.0, "evaluation.early_stopping": {}}, "needs held-out rows"),
}


WRONG = {
    "no evaluation": (lambda: fit(Path("x"), callbacks=[jt.EarlyStopping()]), "stopping needs evaluations"),
    "a rate alone": (lambda: jt.run_config(DIGITS, learning_rate=0.1), "optimizer=, which is not given"),
    "an optimizer": (lambda: jt.run_config(DIGITS, optimizer=0.1), "write optax.adamw"),  # pyright: ignore
}


def test_a_wrong_setting_or_callback_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = list(WRONG.values())
    for overrides, words in WRONG_SETTINGS.values():
        calls.append((lambda given=overrides: jt.run_config(DIGITS, overrides=given, run_dir=tmp_path / "run"), words))
    for call, words in calls:
        with pytest.raises(jt.ConfigError, match=words) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.long
def test_an_optimizer_of_one_s_own_in_a_config(tmp_path: Path) -> None:
    def run(steps: int, **own: Any) -> jt.Result:
        settings = {"optimizer": {"kind": "adamw", "learning_rate": 0.1, "ema_decay": 0.9}}
        return jt.run_config({**DIGITS, **settings}, run_dir=tmp_path, overrides={"train.steps": steps}, **own)

    run(2, optimizer=optax.lion(1e-3), learning_rate=1e-3)
    assert json.loads((tmp_path / "run.json").read_text())["from_python"]["optimizer"] == "optax"
    assert [row["learning_rate"] for row in rows(tmp_path) if "loss" in row] == pytest.approx([1e-3] * 2)
    with pytest.raises(jt.ConfigError, match=r"with its optimizer from Python.*optimizer=\.\.\."):
        run(3)
    assert run(3, optimizer=optax.lion(1e-3), resume="must").step == 3


def test_what_a_callback_logs_is_in_the_metrics_and_the_events(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    y = x @ np.ones((3, 1), np.float32)
    known: list[np.ndarray] = []

    def watch(moment: jt.Moment) -> None:
        known.append(jax.device_get(moment.state.params["w"]))
        errors = (x @ known[-1] - y)[:, 0]
        params = moment.state.params
        moment.log({"rate": 0.25 * moment.step, "params": params, "errors": errors, "picture": np.eye(8)})

    fit(
        tmp_path,
        model=jt.from_functions(lambda key: {"w": jnp.zeros((3, 1))}, lambda params, x: x @ params["w"]),
        task=jt.regression(),
        optimizer=optax.sgd(0.1),
        data={"inputs": x, "targets": y},
        batch_size=32,
        steps=4,
        logging={"tensorboard": True},
        callbacks=[jt.Callback(on_step=watch, every=2)],
    )
    logged = [row for row in rows(tmp_path) if "loss" not in row]
    assert [row["rate"] for row in logged if "rate" in row] == [0.5, 1.0]
    histograms = [row["params/w"] for row in logged if "params/w" in row]
    assert [sum(one["counts"]) for one in histograms] == [3, 3]
    for one, params in zip(histograms, known, strict=True):
        np.testing.assert_allclose((one["edges"][0], one["edges"][-1]), (params.min(), params.max()), rtol=1e-4)
    picture = next(row["picture"] for row in logged if "picture" in row)
    assert np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["png"])))).shape == (8, 8)
    events = list(read_events(tmp_path / "tensorboard"))
    kinds = {(event.step, one.tag): one.WhichOneof("value") for event in events for one in event.summary.value}
    assert {kinds[4, name] for name in ("params/w", "errors")} == {"histo"}
    assert (kinds[2, "rate"], kinds[4, "picture"]) == ("simple_value", "image")
