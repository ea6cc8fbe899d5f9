"""Which steps stay, what a failed save leaves, and saves of several threads."""

import resource
import signal

import jax.numpy as jnp
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


def test_the_best_step_before_early_stopping_stays(tmp_path):
    """Steps saved before early stopping was set have a loss and no score."""
    retention = Retention(1, None, True)
    retention.marks = {10: (1.0, None), 20: (2.0, None), 30: (0.5, -0.9), 40: (0.4, -0.8), 50: (3.0, -0.7)}
    assert retention.kept(tmp_path, retention.marks) == {10, 30, 50}


def test_directory_follows_the_policy(tmp_path):
    policy, kept = POLICIES[-1]
    state = {"x": jnp.ones(4)}
    for half in ((10, 20, 30), (40, 50, 60)):  # a restart in between forgets nothing
        with Checkpointer(tmp_path, **policy) as checkpointer:
            for step in half:
                assert checkpointer.save(step, state, metadata={}, eval_loss=LOSSES[step])
                assert not checkpointer.save(step, state, metadata={}, eval_loss=LOSSES[step]), "saved already"
    assert {int(path.name) for path in tmp_path.iterdir()} == kept


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
