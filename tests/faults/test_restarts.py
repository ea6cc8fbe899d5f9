"""Runs that are started again after a failure: when, from where, and that they end as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.cli import main
from jaxtrain.commands.processes import how_ended
from jaxtrain.run.supervise import FINAL_CODES, supervise

KILLED = 128 + signal.SIGKILL
# Catches a hang only.
LONG_SECONDS = 200


@pytest.mark.parametrize(
    ("code", "restarted"),
    [
        pytest.param(0, False, id="done"),
        pytest.param(1, True, id="saves failed"),
        pytest.param(2, False, id="config"),
        pytest.param(4, False, id="no checkpoint can be used"),
        pytest.param(70, True, id="stalled"),
        pytest.param(75, False, id="preempted"),
        pytest.param(128 + signal.SIGTERM, False, id="asked to end before the first step"),
        pytest.param(KILLED, True, id="killed"),
        pytest.param(128 + signal.SIGABRT, True, id="aborted by jax"),
    ],
)
def test_which_ends_are_restarted(code, restarted):
    assert (code not in FINAL_CODES) == restarted


class Waits:
    """In place of the event of a signal: notes the waits, and is set by the one of a number."""

    def __init__(self, last: int | None) -> None:
        self.found: list[float] = []
        self.last = last

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        self.found.append(seconds)
        return len(self.found) == self.last


# id: (ends: exit code, last row, newest checkpoint), restarts allowed, code, waits, words of the last line
ENDS = {
    "done at once": ([(0, 9, 9)], 3, 0, [], ""),
    "killed once": ([(KILLED, 7, 5), (0, 9, 9)], 3, 0, [1], "was ended by SIGKILL at step 7; restart 1 of 3 in 1 s"),
    "waits grow": (
        [(1, 0, 0), (70, 0, 0), (1, 0, 0), (KILLED, 7, 5), (0, 9, 9)], 4, 0, [1, 2, 4, 8], "restart 4 of 4 in 8 s",
    ),
    "the same twice": ([(1, 7, 5), (1, 7, 5)], 9, 1, [1], "twice in a row: it would fail there again"),
    "too many": ([(1, 1, 0), (1, 2, 0)], 1, 1, [1], "--restarts 1 allows no further restart"),
    "checkpoints fail at the start": ([(4, 0, 0)], 3, 4, [], ""),
}  # fmt: skip


def make_position(run_dir: Path, row: int, saved: int) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, row + 1)) + '{"st')
    if saved:
        (run_dir / "checkpoints" / str(saved) / "jaxtrain").mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize(("ends", "restarts", "code", "waits", "line"), ENDS.values(), ids=ENDS)
def test_when_a_run_is_started_again(tmp_path, capsys, ends, restarts, code, waits, line):
    starts, left = [], iter(ends)
    make_position(tmp_path, 0, 0)

    def start(has_begun: bool) -> int:
        starts.append(has_begun)
        found, row, saved = next(left)
        make_position(tmp_path, row, saved)
        return found

    events = Waits(None)
    asked: Any = events
    assert supervise(start, tmp_path, restarts=restarts, asked=asked, how_ended=how_ended) == code
    began = [any(steps) for _, *steps in [(0, 0, 0), *ends[:-1]]]
    assert (starts, events.found) == (began, waits)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(waits) + ("allows" in line or "twice" in line)
    assert line in (said or [""])[-1]


# A program in place of python: it notes its start, then does what the word of this start says. The note is one write:
# where PYTHONUNBUFFERED is set, print writes the line end apart, and the other process writes between the two.
CHILD = """
import os, signal, sys, time
started = f"started-{os.environ['JAX_PROCESS_ID']}"
number = int(os.path.exists(started))
open(started, "w").close()
sys.stderr.write(f"start {number} of process {os.environ['JAX_PROCESS_ID']}\\n")
sys.stderr.flush()
if os.environ["JAX_PROCESS_ID"] == "0":
    for name in ("SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), lambda *_: os._exit(75))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    open("first", "w").close()
    time.sleep(60 if number == 0 or sys.argv[1] == "waits" else 0)
elif number == 0 and sys.argv[1] == "dies":
    while not os.path.exists("first"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[1] == "waits":
    for name in ("SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), lambda *_: os._exit(75))
    open("ready", "w").close()
    time.sleep(60)
"""


def launch(folder: Path, word: str, *options: str) -> "subprocess.Popen[str]":
    (folder / "child.py").write_text(CHILD)
    words = ["launch", "--processes", "2", "--restarts", "2", *options, "--", sys.executable, "child.py", word]
    return subprocess.Popen(
        [sys.executable, "-m", "jaxtrain", *words], stderr=subprocess.PIPE, text=True, cwd=folder, env=environment()
    )


def environment() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}


def test_all_processes_of_a_program_start_again_where_one_is_lost(tmp_path):
    process = launch(tmp_path, "dies")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    starts = sorted(line.removeprefix("[1] ") for line in err.splitlines() if " of process " in line)
    assert starts == [f"start {number} of process {index}" for number in (0, 1) for index in (0, 1)]
    assert "jaxtrain: the run was ended by SIGKILL; restart 1 of 2 in 1 s\n" in err


def test_the_warning_of_slurm_is_passed_on_and_ends_the_restarts(tmp_path):
    process = launch(tmp_path, "waits")
    wait_until(lambda: all((tmp_path / name).exists() for name in ("first", "ready")), process)
    process.send_signal(signal.SIGUSR2)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "restart" not in err


def wait_until(condition: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + LONG_SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


USAGE = {
    "a command that ends by itself": ("launch --processes 2 --restarts 1 -- config quickstart", "for train without"),
    "a mistake in the config": ("train quickstart train.stepz=3 --restarts 2", "did you mean 'train.steps'?"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "line"), USAGE.values(), ids=USAGE)
def test_mistakes_start_nothing(monkeypatch, capsys, words, line):
    monkeypatch.setattr("jaxtrain.commands.launch.start_child", None)
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert line in err


TINY = {
    "model": dict(kind="transformer", num_layers=1, embed_dim=16, num_heads=2, max_sequence_length=16, dropout=0.1),
    "data": dict(kind="text", tokenizer=dict(kind="byte")),
    "optimizer": dict(kind="adamw", schedule=dict(kind="constant")),
    "train": dict(steps=24, global_batch_size=8),
    "evaluation": dict(max_batches=1),
    "checkpoint": dict(every=5),
    "logging": dict(every=1, tensorboard=False, report=False),
}


def rows(run_dir: Path) -> dict[int, str]:
    """Step -> training loss as it is written, which says every bit."""
    path = run_dir / "metrics.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["step"]: repr(row["loss"]) for row in found if "loss" in row}


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    (folder / "tiny.yaml").write_text(json.dumps(TINY))
    return subprocess.Popen(
        [sys.executable, "-m", "jaxtrain", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(),
    )


def finish(process: "subprocess.Popen[str]") -> str:
    _, err = process.communicate(timeout=LONG_SECONDS)
    assert process.returncode == 0, err
    return err


def children(process: "subprocess.Popen[str]") -> list[int]:
    """Process ids, in the order in which they were started."""
    return [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


# The training command, but that process 1 compiles for longer than Gloo lets process 0 wait for it (30 s) where devices
# meet in a group that did not meet before: all four, in the sum of the gradients.
SLOW = """
import os, sys, time
from jaxtrain.train.step import TrainStep
use = TrainStep.use
def use_late(step, *words, **settings):
    time.sleep(33 if os.environ["JAX_PROCESS_ID"] == "1" else 0)
    return use(step, *words, **settings)
TrainStep.use = use_late
from jaxtrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
def test_a_rank_that_is_killed_changes_no_bit_of_the_losses(tmp_path):
    """Beside it, in a run that nothing disturbs, nobody is lost while a neighbour compiles."""
    launched = ["launch", "--processes", "2", "--emulate", "2"]
    (tmp_path / "slow.py").write_text(SLOW)
    slow = start(tmp_path, *launched, "--", sys.executable, "slow.py", "train", "tiny.yaml", "--run-dir", "undisturbed")
    words = ["--restarts", "2", "--", "train", "tiny.yaml", "--resume", "never", "--run-dir", "killed"]
    process = start(tmp_path, *launched, *words)
    wait_until(lambda: len(rows(tmp_path / "killed")) >= 13, process)
    os.kill(children(process)[1], signal.SIGKILL)
    err = finish(process)
    finish(slow)
    assert "process 1 of 2 was ended by SIGKILL; stopping the others" in err
    assert list(rows(tmp_path / "killed")) == list(range(1, 25))
    assert rows(tmp_path / "killed") == rows(tmp_path / "undisturbed")


@pytest.mark.long
def test_one_process_is_watched_and_started_again(tmp_path):
    process = start(tmp_path, "train", "tiny.yaml", "--emulate", "1", "--run-dir", "killed", "--restarts", "2")
    wait_until(lambda: len(rows(tmp_path / "killed")) >= 13, process)
    os.kill(children(process)[0], signal.SIGKILL)
    assert "restart 1 of 2 in 1 s" in finish(process)
    assert sorted(rows(tmp_path / "killed")) == list(range(1, 25))
