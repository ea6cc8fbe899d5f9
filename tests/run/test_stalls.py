"""Limits by phase, who is behind; with a clock of the test's own."""

import numpy as np
import pytest

from jaxtrain.config.schema import WatchdogConfig
from jaxtrain.metrics import throughput
from jaxtrain.run import watchdog
from jaxtrain.run.watchdog import Activity, Doing, Watchdog, budget, is_behind, patience
from jaxtrain.runtime.heartbeats import Exchange, Peer

LIMITS = WatchdogConfig(
    compile_seconds=2,
    step_seconds=4,
    data_seconds=5,
    other_seconds=6,
    save_seconds=7,
    lost_seconds=8,
)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_every_phase_has_its_limit():
    for phase, median, seconds, key in (
        ("reading data", None, 6, "other_seconds"),
        ("compiling", None, 2, "compile_seconds"),
        ("step", None, 4, "compile_seconds"),  # the first one
        ("step", 0.1, 4, "step_seconds"),
        ("step", 2.0, 20, "step_seconds"),  # ten times a long one
        ("waiting for data", None, 5, "data_seconds"),
        ("waiting for data", 2.0, 20, "data_seconds"),
        ("evaluation", 2.0, 6, "other_seconds"),
        ("saving", 2.0, 7, "save_seconds"),
    ):
        assert budget(LIMITS, Doing(phase, 1, 0, 0.0), median=median) == (seconds, f"watchdog.{key}")
    # A process that starts may be silent for longer.
    for status, seconds in (({}, 16), ({"phase": "reading data"}, 16), ({"phase": "step"}, 8)):
        assert patience(LIMITS, status) == seconds


def peer(process, phase, step, seconds=1.0):
    return Peer(process, "h", {"phase": phase, "step": step, "done": step - 1, "seconds": seconds}, 0.0)


def test_who_is_behind():
    for own, peers, found in (
        (("step", 7), [peer(1, "step", 7)], False),
        (("step", 7), [peer(1, "step", 6)], True),
        (("step", 7), [peer(1, "waiting for data", 7)], True),
        (("step", 7), [peer(1, "step", 8)], False),
        (("step", 7), [peer(1, "step", 8), peer(2, "saving", 5)], True),
        (("waiting for data", 7), [peer(1, "step", 6)], False),  # this one waits for nobody
        (("step", 7), [Peer(1, "h", {}, 0.0)], False),
        (("step", 7), [], False),
    ):
        assert is_behind({"phase": own[0], "step": own[1]}, peers) == found, (own, peers)


def test_an_activity_follows_steps_and_phases():
    clock = Clock()
    activity = Activity(clock)
    activity.begins_at(4)
    batches = activity.fed(iter(["a", "b"]), first=5)
    assert next(batches) == "a"
    assert activity.doing == Doing("step", 5, 4, 100.0)
    clock.now += 2
    activity.finished(5, seconds=2.0)
    assert activity.doing == Doing("step", 5, 5, 102.0)
    clock.now += 0.25  # work between the steps
    assert next(batches) == "b"
    with activity.during("saving"):
        clock.now += 30
        assert activity.status()["phase"] == "saving"
        assert activity.status()["seconds"] == 30
    assert activity.doing == Doing("step", 6, 5, 132.25)
    activity.finished(6, seconds=4.0)
    with pytest.raises(StopIteration):
        next(batches)
    assert activity.doing.phase == "waiting for data"
    assert activity.median_seconds() == 3.0


class Ended(BaseException):
    """In place of the end of this process."""


class Rounds(Exchange):
    """An exchange whose rounds make the clock of the activity go on, and which may come back late."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def round(self, status, seconds, patience):
        self.clock.now += self.seconds
        return []


@pytest.fixture
def watch(tmp_path, capfd, monkeypatch):
    """Runs rounds of a watchdog over an activity, and returns what it said where it ended the process."""

    def end(code):
        raise Ended(code)

    clock = Clock()
    activity = Activity(clock)
    monkeypatch.setattr(watchdog.time, "monotonic", clock)
    monkeypatch.setattr(watchdog.os, "_exit", end)

    def run(rounds, seconds):
        exchange = Rounds(clock, seconds)
        watched = Watchdog(LIMITS, activity, exchange, tmp_path)
        code = None
        try:
            for _ in range(rounds):
                watched._round()
        except Ended as ended:
            code = ended.args[0]
        finally:
            exchange.close()
        return code, capfd.readouterr().err

    return activity, clock, run


@pytest.mark.parametrize(
    ("rounds", "seconds", "code"),
    [
        pytest.param(3, 500.0, None, id="stopped-three-times"),
        pytest.param(30, 0.25, 70, id="standing-still"),
    ],
)
def test_time_in_which_the_process_was_stopped_does_not_count(watch, rounds, seconds, code):
    activity, _, run = watch
    with activity.during("saving"):
        found, said = run(rounds, seconds)
    assert found == code
    assert ("no progress for 7 s at step 0 in phase saving (limit: watchdog.save_seconds=7)" in said) == bool(code)


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
