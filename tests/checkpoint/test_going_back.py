"""Going back to an earlier step: the newest saves stay, what was abandoned is kept, and a kill mixes no two lines."""

import json
import shutil

import jax.numpy as jnp
import pytest

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.storage import Storage

TARGET = {"x": jnp.zeros(4)}


def state(value):
    return {"x": jnp.full(4, float(value))}


def value(checkpointer, step=None):
    return float(checkpointer.restore(TARGET, step=step)["x"][0])


@pytest.fixture
def lines():
    return []


@pytest.fixture
def open_again(tmp_path, lines):
    """A checkpointer of the same directory, as another process would open it."""
    return lambda **options: Checkpointer(
        tmp_path / "checkpoints", **{"keep_last": 2, "report": lines.append, **options}
    )


@pytest.fixture
def worse(open_again):
    """A run that got worse: 10 is the best step, 30 and 40 the newest."""
    checkpointer = open_again(keep_best=True)
    for step in (10, 20, 30, 40):
        assert checkpointer.save(step, state(step), metadata={}, eval_loss=step / 10)
    checkpointer.wait()
    assert checkpointer.steps() == [10, 30, 40]
    yield checkpointer
    checkpointer.close()


def abandoned(checkpointer):
    """Name of the directory -> its steps with the value that each holds."""
    found = {}
    for folder in sorted(checkpointer.directory.glob("abandoned-*")):
        with Checkpointer(folder, read_only=True) as kept:
            found[folder.name] = {step: value(kept, step) for step in kept.steps()}
    return list(found.values())


def test_saves_after_going_back_stay_and_are_resumed(worse, open_again, lines):
    assert value(worse, 10) == 10
    for step, kept in ((15, [10, 15]), (20, [10, 15, 20]), (25, [10, 20, 25])):
        assert worse.save(step, state(-step), metadata={}, eval_loss=1.5)
        worse.wait()
        assert worse.steps() == kept
    assert value(open_again()) == -25
    assert abandoned(worse) == [{30: 30.0, 40: 40.0}]
    (line,) = lines
    assert "\n" not in line
    assert all(word in line for word in ("step 15", "abandoned steps 30, 40", "abandoned-"))


class Killed(BaseException):
    """Ends a save where it stands; nothing is cleaned up, as after kill -9."""


def kill_before_the_save(checkpointer, step, monkeypatch):
    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write", die)
        with pytest.raises(Killed):
            checkpointer.save(step, state(-step), metadata={})


def kill_after_the_save(checkpointer, step, monkeypatch):
    def die(*_):
        raise Killed

    checkpointer.save(step, state(-step), metadata={})
    with monkeypatch.context() as patch:
        patch.setattr("jaxtrain.checkpoint.directory.settle", die)
        with pytest.raises(Killed):
            checkpointer.wait()


def kill_while_steps_move(checkpointer, step, monkeypatch):
    kill_after_the_save(checkpointer, step, monkeypatch)
    note = json.loads((checkpointer.directory / "going_back.json").read_text())
    folder = checkpointer.directory / note["folder"]
    folder.mkdir(exist_ok=True)
    (checkpointer.directory / "40").rename(folder / "40")


@pytest.mark.parametrize(
    ("kill", "complete", "step"),
    [(kill_before_the_save, False, 30), (kill_after_the_save, True, 15), (kill_while_steps_move, True, 30)],
    ids=["before the save", "after the save", "while steps move"],
)
def test_a_kill_leaves_one_line(worse, open_again, monkeypatch, step, kill, complete):
    value(worse, 10)
    kill(worse, step, monkeypatch)
    newest = step if complete else 40
    assert open_again(read_only=True).latest_step() == newest
    with open_again() as after:
        assert value(after) == (-step if complete else 40)
        assert after.save(newest + 10, state(1), metadata={})
        after.wait()
        assert after.steps() == ([step, step + 10] if complete else [40, 50])
        assert abandoned(after) == ([{30: 30.0, 40: 40.0}] if complete else [])
    assert {path.name for path in after.directory.iterdir() if path.suffix == ".json"} == set()


def test_a_kill_while_the_only_step_is_replaced_loses_nothing(open_again, monkeypatch):
    with open_again() as first:
        first.save(7, state(7), metadata={})
    kill_before_the_save(open_again(), 7, monkeypatch)
    with open_again() as after:
        assert after.latest_step() == 7
        assert value(after) == 7


def test_the_way_back(worse, open_again):
    """As docs/checkpoints.md says: move the steps of the new line away and the abandoned ones back."""
    value(worse, 10)
    worse.save(15, state(-15), metadata={})
    worse.close()
    (folder,) = worse.directory.glob("abandoned-*")
    shutil.move(worse.directory / "15", worse.directory.parent / "15")
    for path in folder.iterdir():
        shutil.move(path, worse.directory / path.name)
    assert open_again().steps() == [10, 30, 40]
    assert value(open_again()) == 40
