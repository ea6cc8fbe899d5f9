"""A signal in every phase of a run: it is saved, ends with exit code 75, and goes on as if nothing had been."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from noticed_runs import fit, once, outcome

import jaxtrain as jt

PROGRAM = Path(__file__).parent / "noticed_runs.py"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    fit(folder, lambda name: None)
    return outcome(folder)


# Where the signal comes -> the newest checkpoint afterwards; None: there is none, and nothing was lost.
PHASES: dict[str, int | None] = {
    "reading data": None,
    "compiling": None,
    "training row 22": 5,
    "held-out row 6": 2,
    "held-out row 40": 6,
}


@pytest.mark.parametrize(
    "phase", [pytest.param(name, marks=[pytest.mark.long] * (name != "held-out row 6")) for name in PHASES]
)
def test_a_signal_loses_nothing(phase: str, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    run_dir, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()

    def act() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)  # what is waited for does not come before the signal is heard

    for fault in [phase] + ["restoring checkpoint"] * (phase == "held-out row 6"):
        with pytest.raises(jt.PreemptedError, match="run again"):
            fit(run_dir, once(fault, marks, act))
        assert (marks / fault).exists(), "the run never came there"
    saved = [int(path.name) for path in (run_dir / "checkpoints").glob("*") if path.name.isdecimal()]
    assert max(saved, default=None) == PHASES[phase]
    fit(run_dir, lambda name: None)
    assert outcome(run_dir) == undisturbed


# Where the main thread is, the signals, the exit code, and the newest checkpoint afterwards. `stuck` is in C, as in a
# compilation: no handler runs there again.
PROCESSES: dict[str, tuple[str, list[signal.Signals], int, int | None]] = {
    "compiling, SIGUSR1": ("stuck model", [signal.SIGUSR1], 75, None),
    "waiting for data, SIGUSR2": ("training row 6", [signal.SIGUSR2], 75, 1),
    "Ctrl-C twice": ("stuck model", [signal.SIGINT, signal.SIGINT], 130, None),
}


def wait_for_fault(process: "subprocess.Popen[str]") -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("AT "):
            break


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.long) for name in PROCESSES])
def test_a_process_that_is_stuck_ends_and_goes_on(
    start_ranks, case: str, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    fault, signals, code, saved = PROCESSES[case]
    run_dir, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    [process] = start_ranks([[PROGRAM, run_dir, marks, fault]])
    wait_for_fault(process)
    time.sleep(0.5)  # it says so on its way into the wait
    for number in signals:
        process.send_signal(number)
        time.sleep(0.3)  # two signals of one kind that nobody took yet are one
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert "Traceback" not in said
    assert ("run again to" in said) == (code == 75), said
    found = [int(path.name) for path in (run_dir / "checkpoints").glob("*") if path.name.isdecimal()]
    assert max(found, default=None) == saved
    if code == 75:
        fit(run_dir, lambda name: None)
        assert outcome(run_dir) == undisturbed


@pytest.mark.long
def test_two_processes_leave_an_evaluation_together(start_ranks, tmp_path: Path) -> None:
    """The second gets the signal in its first evaluation."""
    processes = start_ranks([[PROGRAM, tmp_path / "run", tmp_path, "slow evaluation"]] * 2)
    wait_for_fault(processes[1])
    processes[1].send_signal(signal.SIGUSR1)
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [75, 75], said
    assert all("stopped after step 2 of 6" in text for text in said), said


@pytest.mark.long
def test_a_lost_terminal_saves_the_run(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """The kernel sends SIGHUP, and every further write to the terminal fails."""
    terminal, own = pty.openpty()
    command = [sys.executable, str(PROGRAM), str(tmp_path / "run"), str(tmp_path), "training row 6"]
    name = os.ttyname(own)
    # The first terminal that the first process of a session opens becomes the one whose loss it hears of.
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" <{name} >{name} 2>&1', "sh", *command],
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])},
        start_new_session=True,
    )
    said = b""
    while b"AT training" not in said:
        said += os.read(terminal, 4096)
    os.close(own)
    os.close(terminal)
    try:
        assert process.wait(timeout=60) == 75, said
    finally:
        process.kill()
    fit(tmp_path / "run", lambda name: None)
    assert outcome(tmp_path / "run") == undisturbed
