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
    assert "trainer.py" in runs.stacks(0), "and the main thread"
    check_clean(runs.said()[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param(0, signal.SIGKILL, id="process-0-killed"),
        pytest.param(1, signal.SIGKILL, id="process-1-killed"),
        pytest.param(1, signal.SIGSTOP, id="process-1-stopped"),
    ],
)
def test_a_lost_process_ends_the_other(running, victim: int, number: signal.Signals) -> None:
    """A collective that fails ends with a line; otherwise jax aborts, in its own words."""
    runs = running(2, lost_seconds=10)
    runs.wait_for_steps(3)
    runs.processes[victim].send_signal(number)
    survivor = 1 - victim
    check_lost(runs, survivor)
    if number == signal.SIGSTOP:
        runs.processes[victim].send_signal(signal.SIGCONT)
        check_lost(runs, victim)


def check_lost(runs: Runs, index: int) -> None:
    """A process ended because another one is gone: by a line of ours, or by jax."""
    code = runs.code(index)
    assert code in (STALLED, -signal.SIGABRT)
    if code == STALLED:
        assert f"process {index} of 2 (host {socket.gethostname()}): lost another process at step" in runs.said()[index]
        assert "Traceback" not in runs.said()[index]
    else:
        assert "distributed service detected fatal errors" in runs.said()[index]


@pytest.mark.long
@pytest.mark.parametrize("stuck", ["main thread", "source"])
def test_what_is_stuck_in_one_process_ends_all(running, stuck: str) -> None:
    """The process that stands still writes its stacks; a collective of the other fails then, or reached its limit."""
    runs = running(2, step_seconds=6, compile_seconds=120, data_seconds=3, other_seconds=6)
    runs.wait_for_steps(3)
    if stuck == "source":
        (runs.marks / "1").write_text("block")
    else:  # jax's heartbeats go on
        runs.processes[1].send_signal(signal.SIGUSR2)
    assert [runs.code(0), runs.code(1)] == [STALLED, STALLED], runs.said()
    [line] = runs.lines(1)
    assert line.startswith("jaxtrain: process 1 of 2 (host ")
    # A signal may reach the main thread while it waits for data.
    limit = "watchdog.data_seconds=3" if stuck == "source" else "watchdog."
    assert f"(limit: {limit}" in line
    assert ("watched_parts.py" if stuck == "source" else "_stand_still") in runs.stacks(1)
    assert "Traceback" not in runs.said()[0]


@pytest.mark.long
def test_a_step_ends_that_waits_too_long_for_another_process(running) -> None:
    """The one that waits ends at its limit; jax then aborts the one that it waited for, whose stacks are printed."""
    runs = running(2, step_seconds=3, compile_seconds=120, data_seconds=600)
    runs.wait_for_steps(3)
    (runs.marks / "1").write_text("block")
    assert runs.code(0) == STALLED, runs.said()
    assert "in phase step (limit: watchdog.step_seconds=3); stacks: " in runs.lines(0)[0]
    assert runs.code(1) == -signal.SIGABRT
    assert "watched_parts.py" in runs.said()[1]


@pytest.mark.long
def test_pauses_and_errors_are_not_stalls(running) -> None:
    """A run whose machine sleeps for a while goes on; a process that fails prints its own line."""
    runs = running(2, lost_seconds=60, step_seconds=3, compile_seconds=120, data_seconds=3)
    runs.wait_for_steps(3)
    for process in runs.processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(8)
    for process in runs.processes:
        process.send_signal(signal.SIGCONT)
    runs.wait_for_steps(3)
    assert not (runs.run_dir / "stalls").exists()
    (runs.marks / "1").write_text("damaged")
    assert runs.code(1) == 3
    assert runs.lines(1) == ["jaxtrain: row 7 is damaged"]
    check_lost(runs, 0)
