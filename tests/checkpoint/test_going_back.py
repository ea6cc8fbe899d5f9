"""Going back to an earlier step: the newest saves stay, what was abandoned is kept, and a kill mixes no two lines."""

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


def names(checkpointer):
    return sorted(path.name.partition("-")[0] for path in checkpointer.directory.iterdir())


def test_saves_after_going_back_stay_and_are_resumed(worse, open_again, lines):
    assert value(worse, 10) == 10
    for step, kept in ((15, [10, 15]), (20, [10, 15, 20]), (25, [10, 20, 25])):
        assert worse.save(step, state(-step), metadata={}, eval_loss=1.5)
        worse.wait()
        assert worse.steps() == kept
    assert value(open_again()) == -25
    assert names(worse) == ["10", "20", "25", "30.abandoned", "40.abandoned"]
    for line, step in zip(lines, (40, 30), strict=True):
        assert f"step 15 is saved after going back: step {step} is renamed to {step}.abandoned-" in line


class Killed(BaseException):
    """Ends a save where it stands; nothing is cleaned up, as after kill -9."""


@pytest.mark.parametrize("step", [30, 15])
def test_a_kill_before_the_new_step_is_complete_leaves_the_steps_before_it(worse, open_again, monkeypatch, step):
    value(worse, 10)

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write", die)
        with pytest.raises(Killed):
            worse.save(step, state(-step), metadata={})
    with open_again() as after:
        assert value(after) == 10
        assert after.save(20, state(1), metadata={})
        after.wait()
        assert after.steps() == [10, 20]
        assert names(after) == ["10", "20", "30.abandoned", "40.abandoned"]


def test_a_note_of_an_earlier_version_is_no_concern(worse, open_again):
    """It named a folder that steps were moved to, wherever that was."""
    (worse.directory / "going_back.json").write_text('{"after": 10, "step": 30, "folder": "../..", "repl')
    assert open_again(read_only=True).steps() == [10, 30, 40]
    assert worse.save(50, state(50), metadata={})


def test_the_way_back(worse, open_again):
    """As docs/checkpoints.md says: move the new step away and give the abandoned ones their names again."""
    value(worse, 10)
    worse.save(15, state(-15), metadata={})
    worse.close()
    (worse.directory / "15").rename(worse.directory.parent / "15")
    for path in worse.directory.glob("*.abandoned-*"):
        path.rename(path.with_name(path.name.partition(".")[0]))
    assert open_again().steps() == [10, 30, 40]
    assert value(open_again()) == 40
