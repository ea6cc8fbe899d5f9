"""A signal in every phase of a run: it is saved, ends with exit code 75, and goes on as if nothing had been."""

import os
import pty
import signal
import socket
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
    "tracing": None,
    "compiling": None,
    "creating state": None,
    "training row 2": None,
    "training row 22": 5,
    "held-out row 6": 2,
    "held-out row 40": 6,
    "finding mistakes": 6,
}
PLAIN = ("held-out row 6",)


@pytest.mark.parametrize(
    "phase", [pytest.param(name, marks=() if name in PLAIN else pytest.mark.long) for name in PHASES]
)
def test_a_signal_loses_nothing(phase: str, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    run_dir, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()

    def act() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)  # what is waited for does not come before the signal is heard

    with pytest.raises(jt.PreemptedError, match="run again"):
        fit(run_dir, once(phase, marks, act))
    assert list(marks.iterdir()), "the run never came there"
    saved = [int(path.name) for path in (run_dir / "checkpoints").glob("*") if path.name.isdecimal()]
    assert max(saved, default=None) == PHASES[phase]
    fit(run_dir, lambda name: None)
    assert outcome(run_dir) == undisturbed


@pytest.mark.long
def test_a_signal_while_a_checkpoint_is_restored_loses_nothing(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    def act() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    for fault in ("held-out row 6", "restoring checkpoint"):
        with pytest.raises(jt.PreemptedError, match="run again"):
            fit(tmp_path, once(fault, tmp_path, act))
    fit(tmp_path, lambda name: None)
    assert outcome(tmp_path) == undisturbed


# Where the main thread is, the signals, the exit code, and the newest checkpoint afterwards. `stuck` is in C, as in a
# compilation: no handler runs there again.
PROCESSES: dict[str, tuple[str, list[signal.Signals], int, int | None]] = {
    "compiling, SIGUSR1": ("stuck model", [signal.SIGUSR1], 75, None),
    "compiling, Ctrl-C twice": ("stuck model", [signal.SIGINT, signal.SIGINT], 130, None),
    "in a callback, SIGHUP": ("stuck callback after step 2", [signal.SIGHUP], 75, 2),
    "waiting for data, SIGUSR2": ("training row 6", [signal.SIGUSR2], 75, 1),
    "held-out data that hangs, SIGTERM": ("stuck held-out row 6", [signal.SIGTERM], 75, 2),
    "Ctrl-C twice in a callback": ("callback after step 2", [signal.SIGINT, signal.SIGINT], 130, None),
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.long) for name in PROCESSES])
def test_a_process_that_is_stuck_ends_and_goes_on(case: str, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    fault, signals, code, saved = PROCESSES[case]
    run_dir, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    command = [sys.executable, str(PROGRAM), str(run_dir), str(marks), fault]
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("AT "):
                break
        time.sleep(0.5)  # it says so on its way into the wait
        for number in signals:
            process.send_signal(number)
            time.sleep(0.3)  # two signals of one kind that nobody took yet are one
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, said
    assert "Traceback" not in said
    assert ("run again to" in said) == (code == 75), said
    found = [int(path.name) for path in (run_dir / "checkpoints").glob("*") if path.name.isdecimal()]
    assert max(found, default=None) == saved
    if code == 75:
        fit(run_dir, lambda name: None)
        assert outcome(run_dir) == undisturbed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_two(run_dir: Path, fault: str, number: signal.Signals | None) -> list[tuple[int, str]]:
    """Two processes of one run; the second gets the signal in its first evaluation. Exit codes and standard errors."""
    address = f"127.0.0.1:{free_port()}"
    processes = []
    for rank in range(2):
        variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank)}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(run_dir), str(run_dir), fault],
                env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2]), **variables},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    second = processes[1]
    try:
        if number is not None:
            for line in second.stderr:
                if line.startswith("AT "):
                    break
            second.send_signal(number)
        said = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


@pytest.mark.long
def test_two_processes_leave_an_evaluation_together(tmp_path: Path) -> None:
    stopped = run_two(tmp_path / "run", "slow evaluation", signal.SIGUSR1)
    assert [code for code, _ in stopped] == [75, 75], stopped
    assert all("stopped after step 2 of 6" in text for _, text in stopped), stopped
    again = run_two(tmp_path / "run", "no fault", None)
    assert [code for code, _ in again] == [0, 0], again
    whole = run_two(tmp_path / "whole", "no fault", None)
    assert [code for code, _ in whole] == [0, 0], whole
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.long
def test_a_lost_terminal_saves_the_run(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """The kernel sends SIGHUP, and every further write to the terminal fails."""
    terminal, own = pty.openpty()
    command = [sys.executable, str(PROGRAM), str(tmp_path / "run"), str(tmp_path), "callback after step 2"]
    name = os.ttyname(own)
    # The first terminal that the first process of a session opens becomes the one whose loss it hears of.
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" <{name} >{name} 2>&1', "sh", *command],
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])},
        start_new_session=True,
    )
    said = b""
    while b"AT callback" not in said:
        said += os.read(terminal, 4096)
    os.close(own)
    os.close(terminal)
    try:
        assert process.wait(timeout=60) == 75, said
    finally:
        process.kill()
    fit(tmp_path / "run", lambda name: None)
    assert outcome(tmp_path / "run") == undisturbed
