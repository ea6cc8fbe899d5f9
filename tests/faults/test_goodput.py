"""What a failure costs is counted: steps that are done again, and the time until the run goes on."""

import json

import pytest

from jaxtrain.metrics.report.page import write_report
from jaxtrain.metrics.time_spent import TimeSpent, counted_from, earlier_seconds, save_entry
from jaxtrain.run.directory import seconds_before
from jaxtrain.runtime.files import write_json_atomic

SAVE = save_entry(5, {"starting": 2.0, "steps": 8.0}, at=110.0)


def run(status, seconds, *saves):
    return {"status": status, "seconds": seconds, "saves": list(saves)}


def row(began, ended):
    return {"began": began, "ended": ended}


# id: (run.json that was left, rows of restarts.jsonl, step that is gone on from, last sign of life, seconds before);
# the process that counts began at second 130.
CASES = {
    "a first start": ({}, [], 0, None, {}),
    "killed, seen by nobody": (
        run("running", {"starting": 2.0, "steps": 8.0}, SAVE), [], 5, 123.0,
        {"starting": 2.0, "steps": 8.0, "lost steps": 13.0},
    ),
    "killed twice": (
        run("running", {"starting": 2.0, "steps": 8.0}, SAVE), [row(100.0, 114.0), row(116.0, 125.0)], 5, None,
        {"starting": 2.0, "steps": 8.0, "lost steps": 13.0, "restarting": 7.0},
    ),
    "killed before the first save": (
        {}, [row(100.0, 114.0), row(116.0, 125.0)], 0, None, {"lost steps": 23.0, "restarting": 7.0},
    ),
    "ended with an error": (
        run("failed", {"starting": 2.0, "steps": 11.0, "waiting for data": 1.0}, SAVE), [], 5, 123.0,
        {"starting": 2.0, "steps": 8.0, "waiting for data": 0.0, "lost steps": 4.0},
    ),
    "the newest save is damaged": (
        run("running", {"steps": 11.0}, SAVE, save_entry(6, {"steps": 11.0}, at=114.0)),
        [row(100.0, 125.0)], 5, None, {"starting": 2.0, "steps": 8.0, "lost steps": 15.0, "restarting": 5.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("info", "restarts", "step", "last_sign", "seconds"), CASES.values(), ids=CASES)
def test_what_a_failure_cost(info, restarts, step, last_sign, seconds):
    assert earlier_seconds(info, restarts, step=step, began_at=130.0, last_sign=last_sign) == seconds


def test_the_time_after_a_supervisor_gave_up_is_no_time_of_the_run(tmp_path, monkeypatch):
    (tmp_path / "restarts.jsonl").write_text(json.dumps(row(100.0, 125.0)))
    before = run("running", {"steps": 8.0}, SAVE)
    monkeypatch.delenv("JAXTRAIN_ATTEMPT", raising=False)
    day = seconds_before(tmp_path, before, start=5, began_at=86_525.0)
    assert day == {"starting": 2.0, "steps": 8.0, "lost steps": 15.0}
    monkeypatch.setenv("JAXTRAIN_ATTEMPT", "1")
    assert seconds_before(tmp_path, before, start=5, began_at=130.0)["restarting"] == 5.0


def test_steps_that_a_roll_back_does_again_are_lost():
    spent = TimeSpent({"steps": 10.0})
    spent.add("steps", 5.0)
    saved = spent.seconds()
    spent.add("steps", 7.0)
    spent.add("waiting for data", 2.0)
    spent.lose_steps(saved)
    seconds = spent.seconds()
    assert (seconds["steps"], seconds["waiting for data"], seconds["lost steps"]) == (15.0, 0.0, 9.0)


def test_the_start_of_a_process_is_counted():
    plain = TimeSpent()
    assert plain.seconds()["starting"] == 0
    import time

    with counted_from(time.monotonic() - 7):
        spent = TimeSpent()
    # What the machine takes for the two lines.
    assert spent.seconds()["starting"] == pytest.approx(7, abs=1)
    assert time.time() - spent.began_at == pytest.approx(7, abs=1)


def test_the_report_shows_it(tmp_path):
    seconds = {"steps": 60.0, "lost steps": 15.0, "restarting": 5.0, "compiling": 20.0}
    write_json_atomic(tmp_path / "run.json", {"name": "run", "status": "done", "seconds": seconds})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    failure = {"time": "2026-11-23T07:25:45+00:00", "signal": "SIGKILL", "step": 13, "saved_step": 5, "lost_steps": 8}
    (tmp_path / "restarts.jsonl").write_text(json.dumps(failure) + "\n")
    page = write_report(tmp_path).read_text()
    for words in (
        "Goodput 60.0 %",
        "Failures cost 20.0 s",
        "lost steps: 15.0 s (15.0 %)",
        "restarting: 5.0 s (5.0 %)",
        "restarts: 1",
        "SIGKILL",
    ):
        assert words in page
