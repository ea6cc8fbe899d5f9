"""TensorBoard events: what is written, how soon, and what a run that goes on writes again."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from jaxtrain.config.schema import LoggingConfig
from jaxtrain.metrics import event_files as module
from jaxtrain.metrics.event_files import EventFile, TensorBoardWriter, event_files, read_events
from jaxtrain.metrics.writers import open_writers

ROOT = Path(__file__).resolve().parents[2]


def shown(directory):
    """(tag, step) -> how often, and its last number, as TensorBoard shows them: a start hides later steps before it."""
    found = []
    for event in (event for path in event_files(directory) for event in read_events(path)):
        if event.HasField("session_log") and event.session_log.status == event.session_log.START:
            found = [one for one in found if one[1] < event.step]
        found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return Counter((tag, step) for tag, step, _ in found), {(tag, step): value for tag, step, value in found}


def losses(run_dir):
    """step -> the loss that TensorBoard shows, each step once and in its order."""
    counts, values = shown(run_dir / "tensorboard")
    assert set(counts.values()) <= {1}
    steps = [step for tag, step in values if tag == "loss"]
    assert steps == sorted(steps)
    return {step: value for (tag, step), value in values.items() if tag == "loss"}


def write(run_dir, steps, *, resumed_step=0, loss=1.0, tensorboard=True):
    writer = open_writers(run_dir, LoggingConfig(tensorboard=tensorboard), resumed_step=resumed_step)
    for step in steps:
        writer.scalars(step, {"step": step, "loss": loss})
    writer.close()


def killed(run_dir, steps, *, resumed_step=0, kept=None, loss=1.0):
    """A process that wrote its rows, and was killed with no event after `kept` on the disk."""
    write(run_dir, steps, resumed_step=resumed_step, tensorboard=False, loss=loss)
    if kept is not None:
        writer = TensorBoardWriter(run_dir / "tensorboard", resumed_step=resumed_step)
        for step in [step for step in steps if step <= kept]:
            writer.scalars(step, {"loss": loss})
        writer.close()


def test_numbers_and_texts_with_their_step(tmp_path):
    writer = TensorBoardWriter(tmp_path / "tb", resumed_step=4)
    writer.scalars(5, {"step": 5, "loss": 1.25, "model_flops_utilization": None, "grad_norm": math.nan, "a b": 2})
    writer.text(5, "sample", "hello")
    writer.close()
    writer.close()
    [path] = (tmp_path / "tb").iterdir()
    first, start, *events = read_events(path)
    assert first.file_version == "brain.Event:2"
    assert (start.session_log.status, start.step) == (start.session_log.START, 5)
    tags = {value.tag: (event.step, value.simple_value) for event in events for value in event.summary.value}
    assert tags == {"loss": (5, 1.25), "a_b": (5, 2.0), "sample/text_summary": (5, 0.0)}


def test_a_row_is_on_the_disk_a_second_later(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.scalars(1, {"loss": 1.0})
    deadline = time.monotonic() + 30
    while not event_files(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert shown(tmp_path)[0] == {("loss", 1): 1}  # nobody closed it
    writer.close()


def test_a_disk_that_hangs_keeps_no_step_waiting(tmp_path, monkeypatch):
    blocks = threading.Event()
    monkeypatch.setattr(module, "_FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(EventFile, "flush", lambda self: blocks.wait())
    monkeypatch.setattr(module, "_END_SECONDS", 0.1)
    writer = TensorBoardWriter(tmp_path)
    started = time.monotonic()
    for step in range(module._MOST_WAITING + 100):
        writer.scalars(step, {"loss": 1.0})
    writer.close()
    assert time.monotonic() - started < 20
    blocks.set()


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(None, id="no-file"),
        pytest.param(0, id="empty-file"),
        pytest.param(3, id="a-part"),
        pytest.param(6, id="all-that-stays"),
        pytest.param(9, id="steps-that-are-done-again"),
    ],
)
def test_a_resumed_run_writes_what_a_kill_kept_from_the_files(tmp_path, kept):
    killed(tmp_path, range(1, 10), kept=kept)
    write(tmp_path, range(7, 13), resumed_step=6, loss=2.0)
    assert losses(tmp_path) == dict.fromkeys(range(1, 7), 1.0) | dict.fromkeys(range(7, 13), 2.0)


def test_after_several_kills_and_roll_backs_every_step_is_there_once(tmp_path):
    killed(tmp_path, range(1, 10), kept=4)
    killed(tmp_path, range(7, 15), resumed_step=6, kept=8, loss=2.0)  # its files lack 5 and 6 too
    write(tmp_path, range(11, 16), resumed_step=10, loss=3.0)
    write(tmp_path, range(9, 14), resumed_step=8, loss=4.0)
    expected = [*[1.0] * 6, *[2.0] * 2, *[4.0] * 5]
    assert losses(tmp_path) == dict(enumerate(expected, 1))


def test_a_run_killed_before_its_first_save_has_no_step_twice(tmp_path):
    killed(tmp_path, range(1, 5), kept=4)
    write(tmp_path, range(1, 4), loss=2.0)
    assert losses(tmp_path) == dict.fromkeys(range(1, 4), 2.0)


def test_nothing_is_written_again_that_is_there(tmp_path):
    write(tmp_path, range(1, 7))
    write(tmp_path, range(7, 9), resumed_step=6)
    _, last = event_files(tmp_path / "tensorboard")
    assert [event.step for event in read_events(last)] == [0, 7, 7, 8]


def test_texts_and_evaluations_are_written_again(tmp_path):
    def rows(writer):
        writer.scalars(2, {"loss": 1.0})
        writer.scalars(2, {"eval loss@x": 3.0})
        writer.text(2, "sample", "two\nlines")

    writer = open_writers(tmp_path, LoggingConfig(tensorboard=False), resumed_step=0)
    rows(writer)
    writer.close()
    for step in (3, 4):
        write(tmp_path, [step], resumed_step=step - 1)
    counts, _ = shown(tmp_path / "tensorboard")
    wanted = [("loss", 2), ("eval_loss_x", 2), ("sample/text_summary", 2), ("loss", 3), ("loss", 4)]
    assert counts == dict.fromkeys(wanted, 1)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:-5], id="torn"),
        pytest.param(lambda content: content + b"\x05\0\0", id="torn-length"),
        pytest.param(lambda content: content + b"\xff" * 40, id="wild-length"),
        pytest.param(lambda content: content + b"\0" * 64, id="zeros-after-power-loss"),
        pytest.param(lambda content: b"", id="empty"),
    ],
)
def test_a_damaged_file_is_read_up_to_the_damage(tmp_path, damage):
    write(tmp_path, range(1, 7))
    [path] = event_files(tmp_path / "tensorboard")
    path.write_bytes(damage(path.read_bytes()))
    write(tmp_path, range(7, 9), resumed_step=6)
    assert losses(tmp_path) == dict.fromkeys(range(1, 9), 1.0)


def test_files_are_read_in_the_order_in_which_they_were_written(tmp_path):
    ahead = tmp_path / f"events.out.tfevents.{int(time.time()) + 1000}.host"
    ahead.touch()
    writer = TensorBoardWriter(tmp_path)
    writer.scalars(1, {"loss": 1.0})
    writer.close()
    first, last = event_files(tmp_path)
    assert (first, len(last.read_bytes()) > 0) == (ahead, True)


def test_what_a_full_disk_does_not_take_is_written_when_the_run_goes_on(tmp_path, monkeypatch):
    write(tmp_path, range(1, 4))
    tried = threading.Event()

    def full(descriptor, part, write=os.write):
        tried.set()
        return write(descriptor, part[:10])  # a disk that fills up takes the beginning

    with monkeypatch.context() as patch:
        patch.setattr(module, "_FLUSH_SECONDS", 0.01)
        patch.setattr(module.os, "write", full)
        writer = TensorBoardWriter(tmp_path / "tensorboard", resumed_step=2)
        writer.scalars(3, {"loss": 2.0})
        assert tried.wait(60)
        patch.undo()
        writer.scalars(4, {"loss": 2.0})
        writer.close()
    assert losses(tmp_path) == {1: 1.0, 2: 1.0, 4: 2.0}  # the mark is not lost with the first row
    write(tmp_path, [3, 4], resumed_step=2, loss=2.0, tensorboard=False)
    write(tmp_path, [5], resumed_step=4, loss=3.0)
    assert losses(tmp_path) == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: 3.0}


_KILLED = """
import sys, time
from pathlib import Path
from jaxtrain.config.schema import LoggingConfig
from jaxtrain.metrics.writers import open_writers
writer = open_writers(Path(sys.argv[1]), LoggingConfig(), resumed_step=0)
for step in range(1, 10**6):
    writer.scalars(step, {"loss": 1.0})
    if step == 5:
        print("begun", flush=True)
    time.sleep(0.001)
"""


def test_a_kill_loses_nothing(tmp_path):
    words = [sys.executable, "-c", _KILLED, str(tmp_path)]
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    write(tmp_path, [6, 7], resumed_step=5)
    assert losses(tmp_path) == dict.fromkeys(range(1, 8), 1.0)
