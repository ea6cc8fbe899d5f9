"""A config that names functions of one's own goes through the commands: train, resume, eval, plan, bench, launch."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.cli import main
from jaxtrain.config import load_config

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "own_parts.md").read_text()
# File -> text: the config and the modules that the page prints.
FILES = dict(re.findall(r"^```(?:python|yaml)\n# ([\w/.]+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
WRONG_PARTS = """
import numpy as np
from flax import nnx

import jaxtrain as jt


class Net(nnx.Module):
    pass


def nothing():
    pass


def module():
    return Net()


def texts():
    return {"inputs": np.array(["a", "b"])}


def failing():
    def loss(outputs, batch):
        raise ValueError("these are no targets of mine")

    return jt.Task("failing", loss)
"""
OTHER_ROWS = """
import numpy as np


def rows():
    return {"train": {"inputs": np.zeros((32, 2, 4), np.float32)}, "validation": None}
"""
# What makes a run of four steps with a checkpoint in its middle. A schedule would depend on the number of steps.
SHORT = [
    *("train.steps=4", "checkpoint.every=2", "optimizer.learning_rate=null", "logging.every=1"),
    *("logging.report=false", "logging.tensorboard=false"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the package of the page and its config."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_package").mkdir()
    for name, text in {**FILES, "my_package/wrong.py": WRONG_PARTS, "my_package/more.py": OTHER_ROWS}.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def here(folder, monkeypatch) -> Path:
    """The same as the current directory; what is put on Python's path is taken off again."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


@pytest.fixture(scope="module")
def run(folder) -> Path:
    """A finished run of four steps."""
    before, path = os.getcwd(), list(sys.path)
    os.chdir(folder)
    try:
        assert main(["train", "mine.yaml", *SHORT, "--run-dir", "runs/whole"]) == 0
    finally:
        os.chdir(before)
        sys.path[:] = path
    return folder / "runs" / "whole"


def losses(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def test_the_run_is_that_of_the_same_parts_from_python(run, here, tmp_path):
    config = load_config("mine.yaml").config
    sys.path.insert(0, str(here))
    from my_package import losses as their_losses
    from my_package import models

    # The config of the same run without the functions of model and task; the rows and the optimizer are the same.
    keywords = {"model.kind": "mlp", "task": "classification"}
    jt.run_config(
        load_config("mine.yaml", overrides=SHORT, keywords=keywords),
        model=models.build(32, (2, 4), 4),
        task=their_losses.focal(**config.task.args),
        data=jt.open_data(config.data),
        run_dir=tmp_path / "python",
    )
    assert losses(run) == losses(tmp_path / "python")  # the same program
    assert len(set(losses(run))) == 4


def test_a_resumed_run_ends_at_the_same_bits(run, here, cli):
    assert cli("train", "mine.yaml", *SHORT, "train.steps=2", "--run-dir", "runs/halves").code == 0
    answer = cli("train", "mine.yaml", *SHORT, "--run-dir", "runs/halves")
    assert answer.code == 0
    assert "resuming step 2" in answer.err
    assert "has changed" not in answer.err
    assert losses(here / "runs" / "halves") == losses(run)


def test_the_run_is_evaluated_by_the_command_and_opened_by_python(run, here, cli):
    answer = cli("eval", "runs/whole", "--json")
    assert answer.code == 0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    # The same rows on the same mesh.
    found = json.loads(answer.out)
    assert (found["rows"], found["eval_loss"]) == (16, pytest.approx(last["eval_loss"], rel=1e-6))
    opened = jt.open_run(run)
    assert opened.predict(np.zeros((3, 2, 4))).shape == (3, 4)
    assert jt.load_config(str(run)).config.task == load_config("mine.yaml").config.task
    other = jt.open_run(run, overrides={"data": {"call": "my_package.more:rows"}})
    with pytest.raises(jt.DataError, match="no held-out rows"):
        other.evaluate()


# id: (override, the beginning of the line, exit code)
WRONG = {
    "a module in place of a model": (
        "model={call: my_package.wrong:module}",
        "model.call=my_package.wrong:module returned an object of type Net, not a jaxtrain.Model; return ",
        2,
    ),
    "texts as rows": (
        "data={call: my_package.wrong:texts}",
        "data.call=my_package.wrong:texts: train 'inputs' holds <U1, not numbers",
        3,
    ),
    "an error in the loss": (
        "task={call: my_package.wrong:failing}",
        "my_package/wrong.py:26 raised ValueError: these are no targets of mine; --debug shows the traceback",
        2,
    ),
    "a remat policy that does not reach it": (
        "remat.policy=full",
        "remat.policy=full does not apply to a model from Python; build Net with from_stages",
        2,
    ),
}


@pytest.mark.parametrize(("override", "message", "code"), WRONG.values(), ids=WRONG)
def test_wrong_parts(here, cli, override, message, code):
    answer = cli("train", "mine.yaml", override, "--run-dir", "runs/wrong")
    assert answer.err.splitlines()[-1].startswith(f"jaxtrain: {message}")
    assert answer.code == code


@pytest.fixture
def in_subprocesses(monkeypatch):
    """Processes that the commands start find jaxtrain as this one did, before the current directory changed."""
    root = str(Path(jt.__file__).resolve().parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep))


def test_a_plan_says_what_it_knows_and_what_not(here, cli, in_subprocesses):
    answer = cli("plan", "mine.yaml", "--on", "h100x8", "--analytic", "--json")
    assert answer.code == 0, answer.err
    (plan,) = json.loads(answer.out)["plans"]
    numbers = 8 * 32 + 32 + 32 * 4 + 4
    # Two moments in float32, and the counts of the steps (int32 each).
    assert plan["memory"]["parts_bytes"]["parameters"] == 4 * numbers
    assert plan["memory"]["parts_bytes"]["optimizer state"] == pytest.approx(8 * numbers, abs=16)
    assert plan["memory"]["parts_bytes"]["batch"] == 2 * (8 * 4 + 4)  # two rows a device: inputs and target
    assert (plan["fits"], plan["time"], plan["cost"]) == (None, None, None)
    assert plan["unknown"] == "no formula covers the work of model.call, task.call and optimizer.call"


@pytest.mark.long
def test_two_processes_train_the_same(run, here, in_subprocesses):
    words = ["--processes", "2", "--emulate", "4", "--", "train", "mine.yaml", *SHORT, "--run-dir", "runs/two"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "jaxtrain", "launch", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"},
    )
    assert done.returncode == 0, done.stderr
    # Sums over processes come in another order: float32 rounding.
    np.testing.assert_allclose(losses(here / "runs" / "two"), losses(run), rtol=1e-5)
    assert len(jax.devices()) == 8
