"""What ends a run that stands still, with real processes, signals and stuck threads."""

import functools
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

STALLED = 70
# Catches a hang only; a process takes some 10 s to its first step on a machine whose cores are shared.
LONG_SECONDS = 180


class Runs:
    """Processes of one run in a folder, each with its log."""

    def __init__(self, start_ranks: Callable[..., Any], folder: Path, count: int, **watchdog: float) -> None:
        self.folder, self.marks, self.run_dir = folder, folder / "marks", folder / "run"
        self.marks.mkdir()
        config = {
            "model": {"kind": "mlp", "hidden_dims": [8]},
            "task": "classification",
            "data": {"call": "watched_parts:read", "args": {"folder": str(self.marks)}},
            "train": {"steps": 1_000_000, "global_batch_size": 8, "prefetch": 2},
            "evaluation": {"max_batches": 1},
            "checkpoint": {"every": None},
            "logging": {"every": 1, "tensorboard": False, "report": False},
            "watchdog": watchdog,
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        words = ["-m", "jaxtrain", "train", folder / "config.yaml", "--emulate", "1", "--run-dir", self.run_dir]
        self.logs = [folder / f"log-{index}" for index in range(count)]
        self.processes = start_ranks([words] * count, logs=self.logs)

    def wait_for_steps(self, count: int) -> None:
        """Return once so many more steps are logged."""
        wanted = self.steps() + count
        self.wait_until(lambda: self.steps() >= wanted)

    def steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.read_text().count('"loss"') if path.exists() else 0

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG_SECONDS
        while not condition():
            assert all(process.poll() is None for process in self.processes), self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.05)

    def code(self, index: int) -> int:
        return self.processes[index].wait(LONG_SECONDS)

    def said(self) -> list[str]:
        return [log.read_text(errors="replace") for log in self.logs]

    def lines(self, index: int) -> list[str]:
        """What a process said of its end: all but the lines of phases, of steps, and of Gloo's connections."""
        return [line for line in self.logs[index].read_text().splitlines() if line.startswith("jaxtrain: ")]

    def stacks(self, index: int) -> str:
        [path] = (self.run_dir / "stalls").glob(f"*-{index}.txt")
        return path.read_text()


@pytest.fixture
def running(start_ranks, tmp_path: Path) -> Callable[..., Runs]:
    return functools.partial(Runs, start_ranks, tmp_path)


def check_clean(log: str) -> None:
    """One line says why; there is no stack of C++ or Python on the terminal."""
    for text in ("Traceback", "internal error", "Check failure", "*** ", "Terminating process"):
        assert text not in log, log


@pytest.mark.long
def test_a_stuck_source_ends_a_single_run(running) -> None:
    runs = running(1, data_seconds=2)
    runs.wait_for_steps(3)
    (runs.marks / "0").write_text("block")
    assert runs.code(0) == STALLED
    [line] = runs.lines(0)
    assert "in phase waiting for data (limit: watchdog.data_seconds=2); stacks: " in line
    assert "watched_parts.py" in runs.stacks(0), "the thread that reads is among the stacks"
    assert "MainThread" in runs.stacks(0)
    check_clean(runs.said()[0])


@pytest.mark.parametrize(
    ("victim", "number", "why"),
    [
        pytest.param(0, signal.SIGKILL, "its connection closed", id="process-0-killed", marks=pytest.mark.long),
        pytest.param(1, signal.SIGSTOP, "silent for ", id="process-1-stopped", marks=pytest.mark.long),
    ],
)
def test_a_lost_process_ends_the_other(running, victim: int, number: signal.Signals, why: str) -> None:
    runs = running(2, lost_seconds=3)
    runs.wait_for_steps(3)
    runs.processes[victim].send_signal(number)
    survivor = 1 - victim
    assert runs.code(survivor) == STALLED
    if number == signal.SIGSTOP:
        runs.processes[victim].send_signal(signal.SIGCONT)
        assert runs.code(victim) == STALLED, "once it runs again it finds that the others have ended"
        check_clean(runs.said()[victim])
    [line] = runs.lines(survivor)
    assert line.startswith(
        f"jaxtrain: process {victim} of 2 (host {socket.gethostname()}) was lost, last heard of at step"
    )
    assert f": {why}" in line
    assert f"process {victim} (host " in runs.stacks(survivor)
    check_clean(runs.said()[survivor])


@pytest.mark.long
@pytest.mark.parametrize("stuck", ["main thread", "source"])
def test_what_is_stuck_in_one_process_is_named_by_all(running, stuck: str) -> None:
    """The limit of the one that stands still counts, not the shorter one of the other's step, which waits for it."""
    runs = running(2, step_seconds=3, compile_seconds=60, data_seconds=5)
    runs.wait_for_steps(3)
    if stuck == "source":
        (runs.marks / "1").write_text("block")
    else:  # its heartbeats go on
        runs.processes[1].send_signal(signal.SIGUSR2)
    assert [runs.code(0), runs.code(1)] == [STALLED, STALLED]
    for index in (0, 1):
        [line] = runs.lines(index)
        assert line.startswith("jaxtrain: process 1 of 2 "), runs.said()
        assert stuck != "source" or "waiting for data (limit: watchdog.data_seconds=5)" in line
        check_clean(runs.said()[index])
    assert stuck == "source" or "_stand_still" in runs.stacks(1)


@pytest.mark.long
def test_pauses_and_errors_are_not_stalls(running) -> None:
    """A process that was stopped itself goes on; one that fails is named with its own error."""
    runs = running(2, lost_seconds=10, step_seconds=3, compile_seconds=60, data_seconds=3)
    runs.wait_for_steps(3)
    for process in runs.processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    for process in runs.processes:
        process.send_signal(signal.SIGCONT)
    runs.wait_for_steps(3)
    assert not (runs.run_dir / "stalls").exists()
    (runs.marks / "1").write_text("damaged")
    assert [runs.code(0), runs.code(1)] == [3, 3]
    assert runs.lines(1) == ["jaxtrain: row 7 is damaged"]
    [line] = runs.lines(0)
    assert line.startswith("jaxtrain: process 1 of 2 ")
    assert "ended with exit code 3: row 7 is damaged" in line
    for log in runs.said():
        check_clean(log)
