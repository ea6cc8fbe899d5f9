"""Limits by phase, who is behind, who is slow; with a clock of the test's own."""

from pathlib import Path

import pytest

from jaxtrain.config.watchdog import WatchdogConfig
from jaxtrain.run.activity import Activity, Moment
from jaxtrain.run.stalls import behind, budget, describe_processes, patience, place, write_stacks
from jaxtrain.run.stragglers import Stragglers, window_delays
from jaxtrain.run.watchdog import Watchdog
from jaxtrain.runtime.heartbeats import Alone, Peer

LIMITS = WatchdogConfig(
    start_seconds=1,
    compile_seconds=2,
    restore_seconds=3,
    step_seconds=4,
    data_seconds=5,
    evaluation_seconds=6,
    save_seconds=7,
    lost_seconds=8,
)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("phase", "median", "seconds", "key"),
    [
        pytest.param("start", None, 1, "start_seconds", id="start"),
        pytest.param("reading data", None, 1, "start_seconds", id="reading"),
        pytest.param("compiling", None, 2, "compile_seconds", id="compiling"),
        pytest.param("creating state", None, 3, "restore_seconds", id="restoring"),
        pytest.param("step", None, 4, "compile_seconds", id="first-step"),
        pytest.param("step", 0.1, 4, "step_seconds", id="step-of-usual-length"),
        pytest.param("step", 2.0, 20, "step_seconds", id="ten-times-a-long-step"),
        pytest.param("waiting for data", None, 5, "data_seconds", id="first-batch"),
        pytest.param("waiting for data", 2.0, 20, "data_seconds", id="batch-of-long-steps"),
        pytest.param("evaluation", 2.0, 6, "evaluation_seconds", id="evaluation"),
        pytest.param("callback", 2.0, 6, "evaluation_seconds", id="callback"),
        pytest.param("report", None, 6, "evaluation_seconds", id="report"),
        pytest.param("saving", 2.0, 7, "save_seconds", id="saving"),
    ],
)
def test_every_phase_has_its_limit(phase, median, seconds, key):
    assert budget(LIMITS, Moment(phase, 1, 0, 0.0), median=median) == (seconds, f"watchdog.{key}")


@pytest.mark.parametrize(
    ("status", "seconds"),
    [
        pytest.param({}, 16, id="nothing-said-yet"),
        pytest.param({"phase": "reading data"}, 16, id="reading"),
        pytest.param({"phase": "step"}, 8, id="step"),
    ],
)
def test_a_process_that_starts_may_be_silent_for_longer(status, seconds):
    assert patience(LIMITS, status) == seconds


def peer(process, phase, step, seconds=1.0):
    return Peer(process, "h", {"phase": phase, "step": step, "done": step - 1, "seconds": seconds}, 0.0)


@pytest.mark.parametrize(
    ("own", "peers", "found"),
    [
        pytest.param(("step", 7), [peer(1, "step", 7)], None, id="all-in-the-same-step"),
        pytest.param(("step", 7), [peer(1, "step", 6)], 1, id="an-earlier-step"),
        pytest.param(("step", 7), [peer(1, "waiting for data", 7)], 1, id="no-batch-for-the-same-step"),
        pytest.param(("step", 7), [peer(1, "step", 8)], None, id="a-later-step"),
        pytest.param(("step", 7), [peer(1, "step", 6), peer(2, "saving", 5)], 2, id="the-last-of-all"),
        pytest.param(("waiting for data", 7), [peer(1, "step", 6)], None, id="this-one-waits-for-nobody"),
        pytest.param(("step", 7), [Peer(1, "h", {}, 0.0)], None, id="nothing-known"),
        pytest.param(("step", 7), [], None, id="alone"),
    ],
)
def test_who_is_behind(own, peers, found):
    answer = behind({"phase": own[0], "step": own[1]}, peers)
    assert (None if answer is None else answer.process) == found


def test_an_activity_follows_steps_and_phases():
    clock = Clock()
    activity = Activity(clock)
    activity.begins_at(4)
    batches = activity.fed(iter(["a", "b"]), first=5)
    assert next(batches) == "a"
    assert activity.moment == Moment("step", 5, 4, 100.0)
    clock.now += 2
    activity.finished(5, seconds=2.0, waited=0.5)
    assert activity.moment == Moment("step", 5, 5, 102.0)
    clock.now += 0.25  # work between the steps
    assert next(batches) == "b"
    with activity.during("saving"):
        clock.now += 30
        assert activity.status()["phase"] == "saving"
        assert activity.status()["seconds"] == 30
    assert activity.moment == Moment("step", 6, 5, 132.25)
    activity.finished(6, seconds=4.0, waited=0.0)
    with activity.during("saving"):  # what process 0 alone writes makes it no slow process
        clock.now += 30
    with pytest.raises(StopIteration):
        next(batches)
    assert activity.moment.phase == "waiting for data"
    assert activity.status()["totals"] == [2, 6.0, 0.75]
    assert activity.median_seconds() == 3.0


def test_an_evaluation_makes_progress_with_every_batch():
    clock = Clock()
    activity = Activity(clock)
    with activity.during("evaluation"):
        batches = activity.ticking(iter("ab"))
        clock.now += 5
        assert next(batches) == "a"
        assert activity.moment.since == 105


def sums(*rates, steps):
    """Process -> sums after so many steps of a second, each with its own seconds per step."""
    return {process: (steps, float(steps), rate * steps) for process, rate in enumerate(rates)}


@pytest.mark.parametrize(
    ("rates", "extra"),
    [
        pytest.param((0.1, 0.1), {0: 0.0, 1: 0.0}, id="equal"),
        pytest.param((0.1, 0.5), {0: 0.0, 1: 0.4}, id="one-of-two"),
        pytest.param((0.1, 0.1, 0.1, 0.6), {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.5}, id="one-of-four"),
    ],
)
def test_delays_of_a_window(rates, extra):
    found = window_delays(sums(*rates, steps=10), sums(*rates, steps=30))
    assert {process: delay.extra_seconds for process, delay in found.items()} == pytest.approx(extra)
    assert {delay.step_seconds for delay in found.values()} == {1.0}


def test_a_process_is_named_after_three_slow_windows_and_again_once_it_was_not():
    stragglers = Stragglers(0.2)
    total = {0: (0, 0.0, 0.0), 1: (0, 0.0, 0.0)}
    said = []
    for slow in (1, 1, 1, 1, 1, 0, 1, 1, 1):
        stragglers.note(total)
        steps = total[0][0] + 10
        total = {0: (steps, float(steps), 0.0), 1: (steps, float(steps), total[1][2] + 5.0 * slow)}
        assert stragglers.note({process: (n - 5, *rest) for process, (n, *rest) in total.items()}) == {}, (
            "too few steps"
        )
        said.append(list(stragglers.note(total)))
    assert said == [[], [], [1], [], [], [], [], [], [1]]


def test_the_file_says_what_every_process_did(tmp_path: Path):
    own = {"phase": "step", "step": 3, "done": 1, "seconds": 9.04}
    table = describe_processes(0, "a", own, [Peer(2, "c", {}, 0.0), Peer(1, "b", own, 5.0)])
    assert table == [
        "  process 0 (host a): step for 9.0 s at step 3; last step done: 1",
        "  process 1 (host b): step for 9.0 s at step 3; last step done: 1, heard 5 s ago",
        "  process 2 (host c): nothing heard yet",
    ]
    write_stacks(tmp_path / "stalls" / "x.txt", "why", table)
    text = (tmp_path / "stalls" / "x.txt").read_text()
    assert text.startswith("why\n\nprocesses:\n  process 0 ")
    assert "MainThread" in text
    assert "test_stalls.py" in text, "the stack of this thread"
    write_stacks(Path("/dev/null/x.txt"), "why", table)  # no error: the process ends anyway
    assert place({}) == "at its start"


class Ended(BaseException):
    """In place of the end of this process."""


class Rounds(Alone):
    """An exchange whose rounds make the clock of the activity go on, and which may come back late."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def round(self, status, seconds, patience):
        self.clock.now += self.seconds
        return []


@pytest.fixture
def watch(tmp_path, capfd):
    """Runs rounds of a watchdog over an activity, and returns what it said where it ended the process."""

    def end(code):
        raise Ended(code)

    clock = Clock()
    activity = Activity(clock)

    def run(rounds, seconds):
        options = {"process": 0, "num_processes": 1, "report": pytest.fail, "clock": clock, "exits": end}
        watchdog = Watchdog(LIMITS, activity, Rounds(clock, seconds), tmp_path, **options)
        code = None
        try:
            for _ in range(rounds):
                watchdog._round()
        except Ended as ended:
            code = ended.args[0]
        return code, capfd.readouterr().err

    return activity, clock, run


@pytest.mark.parametrize(
    ("is_written", "code"), [pytest.param(True, None, id="complete"), pytest.param(False, 70, id="stuck")]
)
def test_a_checkpoint_in_the_background_has_a_limit(watch, tmp_path, is_written, code):
    activity, _, run = watch
    activity.finished(1, seconds=100.0, waited=0.0)  # so that the step may take longer than the save
    activity.computes(2)
    activity.writes(tmp_path / "5")
    if is_written:
        (tmp_path / "5").mkdir()
    found, said = run(rounds=40, seconds=0.25)
    assert found == code
    assert ("is still being written after 7 s, in phase saving (limit: watchdog.save_seconds=7)" in said) == bool(code)


@pytest.mark.parametrize(
    ("rounds", "seconds", "code"),
    [
        pytest.param(1, 500.0, None, id="stopped-once-for-long"),
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


def test_a_notebook_is_told_once_and_not_ended(watch, monkeypatch, tmp_path):
    activity, _, run = watch
    monkeypatch.setattr("jaxtrain.run.watchdog.in_notebook", lambda: True)
    with activity.during("saving"):
        found, said = run(rounds=40, seconds=0.25)
    assert found is None
    assert said.count("interrupt the cell to stop") == 1
    assert len(list((tmp_path / "stalls").iterdir())) == 1
