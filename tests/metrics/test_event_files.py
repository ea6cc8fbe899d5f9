"""TensorBoard events: what is written, and what a run that goes on writes again."""

import math
import threading
import time

import pytest

from jaxtrain.config.schema import LoggingConfig
from jaxtrain.metrics import event_files as module
from jaxtrain.metrics.event_files import EventFile, TensorBoardWriter, event_files, read_events
from jaxtrain.metrics.writers import open_writers


def losses(run_dir):
    """step -> the loss that TensorBoard shows: a start hides later steps before it; each is there once."""
    found = []
    for event in (event for path in event_files(run_dir / "tensorboard") for event in read_events(path)):
        if event.HasField("session_log") and event.session_log.status == event.session_log.START:
            found = [one for one in found if one[0] < event.step]
        found += [(event.step, value.simple_value) for value in event.summary.value if value.tag == "loss"]
    assert len(dict(found)) == len(found)
    return dict(found)


def write(run_dir, steps, *, resumed_step=0, loss=1.0, tensorboard=True):
    writer = open_writers(run_dir, LoggingConfig(tensorboard=tensorboard), resumed_step=resumed_step)
    for step in steps:
        writer.scalars(step, {"step": step, "loss": loss})
    writer.close()


def test_numbers_and_texts_with_their_step(tmp_path):
    writer = TensorBoardWriter(tmp_path / "tb", resumed_step=4)
    writer.scalars(5, {"step": 5, "loss": 1.25, "model_flops_utilization": None, "grad_norm": math.nan, "a b": 2})
    writer.text(5, "sample", "hello")
    writer.close()
    [path] = (tmp_path / "tb").iterdir()
    first, start, *events = read_events(path)
    assert first.file_version == "brain.Event:2"
    assert (start.session_log.status, start.step) == (start.session_log.START, 5)
    tags = {value.tag: (event.step, value.simple_value) for event in events for value in event.summary.value}
    assert tags == {"loss": (5, 1.25), "a_b": (5, 2.0), "sample/text_summary": (5, 0.0)}


def test_a_disk_that_hangs_keeps_no_step_waiting(tmp_path, monkeypatch):
    blocks = threading.Event()
    monkeypatch.setattr(module, "_FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(EventFile, "flush", lambda self: blocks.wait())
    monkeypatch.setattr(module, "_END_SECONDS", 0.1)
    writer = TensorBoardWriter(tmp_path)
    started = time.monotonic()
    for step in range(100):
        writer.scalars(step, {"loss": 1.0})
    writer.close()
    assert time.monotonic() - started < 20
    blocks.set()


@pytest.mark.parametrize("kept", [3, 9], ids=["a part was written", "steps that are done again"])
def test_a_resumed_run_writes_what_a_kill_kept_from_the_files(tmp_path, kept):
    write(tmp_path, range(1, 10), tensorboard=False)
    writer = TensorBoardWriter(tmp_path / "tensorboard")
    for step in range(1, kept + 1):
        writer.scalars(step, {"loss": 1.0})
    writer.close()
    [path] = event_files(tmp_path / "tensorboard")
    path.write_bytes(path.read_bytes() + b"\xff" * 40)  # torn by the kill: read up to there
    write(tmp_path, range(7, 13), resumed_step=6, loss=2.0)
    assert losses(tmp_path) == dict.fromkeys(range(1, 7), 1.0) | dict.fromkeys(range(7, 13), 2.0)
