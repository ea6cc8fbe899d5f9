"""Which steps stay, what a failed save leaves, and saves of several threads."""

import resource
import signal
import stat

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.upkeep import Retention
from jaxtrain.errors import CheckpointError

NAN = float("nan")
LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: None, 50: NAN, 60: 1.0}
POLICIES = [
    ({"keep_last": 1}, {60}),
    ({"keep_last": 2}, {50, 60}),
    ({"keep_last": 9}, set(LOSSES)),
    ({"keep_last": 1, "keep_every": 20}, {20, 40, 60}),
    ({"keep_last": 1, "keep_best": True}, {20, 60}),
    ({"keep_last": 2, "keep_every": 30, "keep_best": True}, {20, 30, 50, 60}),
]


def test_policy(tmp_path):
    for policy, kept in POLICIES:
        retention = Retention(**{"keep_every": None, "keep_best": False, **policy})
        retention.marks = {step: (loss, None) for step, loss in LOSSES.items()}
        assert retention.kept(tmp_path, LOSSES) == kept, policy


def test_directory_follows_the_policy(tmp_path):
    policy, kept = POLICIES[-1]
    state = {"x": jnp.ones(4)}
    for half in ((10, 20, 30), (40, 50, 60)):  # a restart in between forgets nothing
        with Checkpointer(tmp_path, **policy) as checkpointer:
            for step in half:
                assert checkpointer.save(step, state, metadata={}, eval_loss=LOSSES[step])
                assert not checkpointer.save(step, state, metadata={}, eval_loss=LOSSES[step]), "saved already"
    assert {int(path.name) for path in tmp_path.iterdir()} == kept


# id: scores of the earlier steps, after which step losses are of the same rows, losses and scores of those saved then
SCORED_AGAIN = {
    "by another metric": ({10: 1.0, 20: 2.0}, 0, {30: (3.0, -5.0)}, {30}),
    "on other rows": ({}, 20, {30: (3.0, None), 40: (4.0, None)}, {30, 40}),
}


@pytest.mark.parametrize("case", SCORED_AGAIN)
def test_the_best_step_where_a_restart_compares_something_else(tmp_path, case):
    scores, after, later, kept = SCORED_AGAIN[case]
    state = {"x": jnp.ones(4)}
    with Checkpointer(tmp_path, keep_last=2, keep_best=True) as checkpointer:
        checkpointer.save(10, state, metadata={}, eval_loss=1.0, score=-0.4)
        checkpointer.save(20, state, metadata={}, eval_loss=2.0, score=-0.9)
    with Checkpointer(tmp_path, keep_last=1, keep_best=True) as checkpointer:
        checkpointer.score_again(scores, after=after)
        for step, (loss, score) in later.items():
            checkpointer.save(step, state, metadata={}, eval_loss=loss, score=score)
    assert {int(path.name) for path in tmp_path.iterdir()} == kept


def test_numbers_of_any_library(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (np.int64(7), jnp.int32(8)):
            assert checkpointer.save(step, {"x": jnp.ones(4)}, metadata={}, eval_loss=jnp.float32(2))
        checkpointer.wait()
        assert checkpointer.steps() == [7, 8]
        assert checkpointer.info(8).eval_loss == 2


def test_directories_are_private(tmp_path):
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, {"x": jnp.ones(4)}, metadata={})
        checkpointer.wait()
        for path in (checkpointer.directory, checkpointer.directory / "1"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o750


@pytest.fixture
def small_files():
    """No file may grow beyond 64 KiB, which looks to a writer as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("notice", ["save", "check"])
def test_a_failure_in_the_background_is_one_line(tmp_path, request, capfd, notice):
    big = {"x": jnp.arange(1 << 18, dtype=jnp.uint32) * jnp.uint32(2654435761)}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": big["x"][:8]}, metadata={})
    checkpointer.wait()
    request.getfixturevalue("small_files")
    checkpointer.save(2, big, metadata={})

    def poll():
        while True:
            checkpointer.check()

    act = {"check": poll, "save": lambda: checkpointer.save(3, {"x": big["x"][:8]}, metadata={})}
    with pytest.raises(CheckpointError, match=r"cannot save checkpoint .*/2: ") as caught:
        act[notice]()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    # What is saved stays, what failed is gone, and the next save works.
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert checkpointer.save(3, {"x": big["x"][:8]}, metadata={})
    checkpointer.close()
    assert checkpointer.steps() == [1, 3]
    assert capfd.readouterr().err == ""


def test_a_save_after_close_is_refused_in_one_line(tmp_path):
    """It would be lost where the process ends before it is complete; who enters the block again saves again."""
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2):
        with checkpointer:
            assert checkpointer.save(step, {"x": jnp.ones(4)}, metadata={})
        with pytest.raises(CheckpointError, match=r"^checkpoints in [^\n]* are closed: [^\n]*$"):
            checkpointer.save(9, {"x": jnp.ones(4)}, metadata={})
    assert checkpointer.steps() == [1, 2]
