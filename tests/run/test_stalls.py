"""Limits by phase, what counts as progress, and errors of a collective whose peer is gone."""

import threading

import jax
import numpy as np
import pytest

from jaxtrain.config.schema import WatchdogConfig
from jaxtrain.errors import LostProcessError
from jaxtrain.metrics import throughput
from jaxtrain.run import watchdog
from jaxtrain.run.watchdog import Activity, Doing, limit_of, watched

LIMITS = WatchdogConfig(compile_seconds=2, step_seconds=4, data_seconds=5, other_seconds=6, save_seconds=7)


def test_every_phase_has_its_limit():
    for phase, step_seconds, seconds, key in (
        ("reading data", 0.0, 6, "other_seconds"),
        ("compiling", 0.0, 2, "compile_seconds"),
        ("step", 0.0, 2, "compile_seconds"),  # the first one
        ("step", 0.1, 4, "step_seconds"),
        ("step", 2.0, 20, "step_seconds"),  # ten times a long one
        ("waiting for data", 0.0, 5, "data_seconds"),
        ("waiting for data", 2.0, 20, "data_seconds"),
        ("evaluation", 2.0, 6, "other_seconds"),
        ("saving", 2.0, 7, "save_seconds"),
    ):
        assert limit_of(LIMITS, phase, step_seconds=step_seconds) == (seconds, f"watchdog.{key}")


def test_an_activity_follows_steps_and_phases():
    activity = Activity()
    batches = activity.fed(iter(["a", "b"]), first=5)
    assert next(batches) == "a"
    assert activity.doing == Doing("step", 5)
    assert next(batches) == "b"
    with activity.during("saving"):
        assert activity.doing == Doing("saving", 6)
    assert activity.doing == Doing("step", 6)
    with pytest.raises(StopIteration):
        next(batches)
    assert activity.doing == Doing("waiting for data", 7)


class Ended(BaseException):
    """In place of the end of this process."""


class Rounds(threading.Event):
    """Wakes the watchdog a number of times, after each of which the main thread may have made progress."""

    def __init__(self, count, between):
        super().__init__()
        self.left = count
        self.between = between

    def wait(self, timeout=None):
        self.between()
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize(("makes_progress", "ends"), [(True, False), (False, True)], ids=["progress", "standing-still"])
def test_a_phase_without_progress_ends(makes_progress, ends, tmp_path, monkeypatch):
    def end(reason, run_dir):
        raise Ended(reason)

    monkeypatch.setattr(watchdog, "_end", end)
    activity = Activity()
    batches = activity.ticking(iter(range(100)))
    reason = ""
    with activity.during("saving"):
        try:
            rounds = Rounds(30, (lambda: next(batches)) if makes_progress else (lambda: None))
            watchdog._watch(LIMITS, activity, tmp_path, rounds)
        except Ended as ended:
            reason = str(ended)
    expected = "no progress for 8 s at step 0 in phase saving (limit: watchdog.save_seconds=7)"
    assert reason == (expected if ends else "")


@pytest.mark.parametrize(
    ("count", "text", "kind"),
    [
        pytest.param(2, "UNKNOWN: Gloo all-reduce failed: Connection closed by peer", LostProcessError, id="gloo"),
        pytest.param(2, "RESOURCE_EXHAUSTED: out of memory", ValueError, id="another-error"),
        pytest.param(1, "NCCL operation failed", ValueError, id="one-process"),
    ],
)
def test_a_collective_whose_peer_is_gone_ends_with_one_line(count, text, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: count)
    with pytest.raises(kind, match=text.partition(":")[0]), watched(None, tmp_path):
        raise ValueError(f"{text}\nand more lines")


def test_a_step_s_seconds_are_its_own_wait_and_its_own_work(monkeypatch):
    now, waits, found = 0.0, [0.1 * number for number in range(1, 7)], []
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now)
    clock, pending = throughput.StepClock(), None
    for number, wait in enumerate(waits):
        now += wait
        if pending is None:
            clock.begin()
        for _ in range(pending is not None):
            now += 0.5  # the work of the step before, which is read now
            found.append(clock.done(pending, wait))
        pending = wait
        if number == 3:  # a pause, with nothing in flight
            now += 0.5
            found.append(clock.done(pending, 0.0))
            now, pending = now + 100, None
    np.testing.assert_allclose(found, [0.5 + wait for wait in waits[:-1]])
