"""Trackers: what is sent, what a resume sends again, and that none of them stops or slows a run."""

import json
import sys
import threading
import time
import types

import pytest

from jaxtrain.config.schema import LoggingConfig
from jaxtrain.errors import ConfigError
from jaxtrain.metrics import writers
from jaxtrain.metrics.trackers import TRACKERS, BackgroundTracker, Tracker, open_trackers

REFUSED = OSError("refused")
INFO = {"name": "r", "config": {"train": {"steps": 4}, "seed": 0}, "git_commit": "abc"}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """What waits is sent at once, so that no test waits for it."""
    monkeypatch.setattr(writers, "COLLECTED_SECONDS", 0.01)


class FakeTracker:
    """Remembers what it was given; fails where it is told to."""

    def __init__(self, fails=(), blocks=None):
        self.fails, self.blocks = fails, blocks
        self.ids, self.rows, self.texts, self.ended, self.last_step = [], [], [], [], None

    def check(self, name):
        if self.blocks is not None:
            self.blocks.wait()
        if name in self.fails:
            raise REFUSED

    def open(self, known_id, begun):
        self.check("open")
        self.ids.append(known_id)
        return Tracker(known_id or "id1", "somewhere", self.take_rows, self.take_text, self.end, self.last_step)

    def take_rows(self, rows):
        self.check("rows")
        self.rows += [(row.step, dict(row.values)) for row in rows]

    def take_text(self, step, name, value):
        self.check("text")
        self.texts.append((step, name, value))

    def end(self, status, files):
        self.check("end")
        self.ended.append(status)


def started(fake, tmp_path, lines, *, is_resumed=False):
    return BackgroundTracker("fake", fake.open, tmp_path, is_resumed=is_resumed, report=lines.append)


def ended(tracker, status="done", *, seconds=20.0, insists=0.1):
    tracker.begin_end(status, (), until=time.monotonic() + insists)
    until = time.monotonic() + seconds
    tracker.wait_for_end(lambda: time.monotonic() >= until)


def test_everything_arrives_once_in_its_order_over_resumes(tmp_path):
    first, second, third, lines = FakeTracker(), FakeTracker(), FakeTracker(), []
    tracker = started(first, tmp_path, lines)
    tracker.scalars(10, {"step": 10, "loss": 2.0, "model_flops_utilization": None})
    tracker.text(10, "sample", "hello")
    tracker.scalars(20, {"loss": float("nan")})
    tracker.scalars(20, {"eval_loss": 5.0})
    ended(tracker)
    assert repr(first.rows) == "[(10, {'loss': 2.0}), (20, {'loss': nan}), (20, {'eval_loss': 5.0})]"
    assert (first.texts, first.ended, lines) == ([(10, "sample", "hello")], ["done"], ["fake: somewhere"])
    # What a kill kept from the tracker is in metrics.jsonl.
    rows = [
        '{"step": 10, "loss": 2.0}',
        '{"step": 25, "loss": 0.9}',
        '{"step": 25, "sample": "text"}',
        '{"step": 3, "l',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    tracker = started(second, tmp_path, lines, is_resumed=True)
    tracker.scalars(20, {"loss": 1.0, "eval_loss": 1.0})
    tracker.scalars(30, {"loss": 0.8})
    ended(tracker)
    assert (second.ids, second.texts) == (["id1"], [(25, "sample", "text")])
    assert second.rows == [(25, {"loss": 0.9}), (30, {"loss": 0.8})]
    ended(started(third, tmp_path, lines))
    assert third.ids == [None]  # a run that begins anew


@pytest.mark.parametrize(
    ("arrived", "sent"),
    [
        pytest.param(None, [3, 4], id="cannot-tell"),
        pytest.param({"loss": 1}, [2, 3, 4], id="not-arrived"),
    ],
)
def test_what_was_being_sent_at_a_kill_is_asked_of_the_tracker(tmp_path, arrived, sent):
    (tmp_path / "trackers").mkdir()
    noted = {"id": "a", "last_steps": {"loss": 2}, "run_dir": str(tmp_path)}
    (tmp_path / "trackers" / "fake.json").write_text(json.dumps(noted))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in (1, 2, 3)))
    fake, lines = FakeTracker(), []
    fake.last_step = None if arrived is None else arrived.get
    tracker = started(fake, tmp_path, lines, is_resumed=True)
    tracker.scalars(4, {"loss": 1.0})
    ended(tracker)
    assert [step for step, _ in fake.rows] == sent


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("open", "did not receive 3 rows: OSError: refused; metrics.jsonl has them all"),
        ("rows", "did not receive 2 rows: OSError: refused; metrics.jsonl has them all"),
        ("text", "did not receive 1 rows: OSError: refused; metrics.jsonl has them all"),
        ("end", "has all rows, but not the end of the run: OSError: refused"),
    ],
)
def test_a_tracker_that_fails_is_one_line_at_the_end(tmp_path, fails, said):
    fake, lines = FakeTracker([fails]), []
    tracker = started(fake, tmp_path, lines)
    tracker.scalars(1, {"loss": 1.0})
    tracker.text(1, "sample", "hello")
    tracker.scalars(2, {"loss": 1.0})
    ended(tracker)
    assert lines.count(f"fake {said}") == 1


def test_a_tracker_that_hangs_costs_neither_rows_nor_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "MOST_WAITING", 10)
    blocks, lines = threading.Event(), []
    tracker = started(FakeTracker(blocks=blocks), tmp_path, lines)
    for step in range(50):
        tracker.scalars(step, {"loss": 1.0})  # returns although the queue is full
    ended(tracker, seconds=0.05)
    assert lines == ["fake did not receive 50 rows: it did not answer; metrics.jsonl has them all"]
    blocks.set()
    tracker._thread.join(20)


@pytest.mark.parametrize("name", TRACKERS)
def test_missing_package_is_one_line_and_touches_nothing(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    config = LoggingConfig.model_validate({name: True})
    with pytest.raises(ConfigError, match=rf"logging.{name}=true.*pip install '\.\[{name}\]'") as caught:
        open_trackers(tmp_path, config, info=INFO, is_resumed=False, report=print)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


class _FakeWandbRun:
    offline, url = True, None

    def __init__(self, calls, settings):
        self.id, self.calls, self.summary = settings.get("id") or "id1", calls, {}
        self.settings = types.SimpleNamespace(sync_dir="folder")

    def define_metric(self, *names, **more):
        pass

    def log(self, values):
        self.calls.append(values)

    def mark_preempting(self):
        self.calls.append("preempting")

    def finish(self, exit_code):
        self.calls.append(("finish", exit_code, self.summary["status"]))


def test_wandb_resumes_its_own_run(tmp_path, monkeypatch):
    calls, settings = [], []

    def init(**given):
        settings.append(given)
        return _FakeWandbRun(calls, given)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, login=lambda prompt: True, __spec__="w"))
    for step, status in ((1, "preempted"), (5, "done")):
        config = LoggingConfig(wandb=True, tags={"team": "a", "api_key": "s3cret"})
        trackers = open_trackers(tmp_path, config, info=INFO, is_resumed=step > 1, report=lambda line: None)
        trackers.scalars(step, {"loss": 0.5, "model_flops_utilization": None, "grad_norm": float("nan")})
        trackers.end(status)
    assert [given["id"] for given in settings] == [None, "id1"]
    assert settings[0]["config"] == {"train.steps": 4, "seed": 0}
    assert {"team=a", "git_commit=abc", "api_key=(redacted)"} <= set(settings[0]["tags"])
    first, second = {"step": 1, "loss": 0.5}, {"step": 5, "loss": 0.5}
    assert calls == [first, "preempting", ("finish", 75, "preempted"), second, ("finish", 0, "done")]
