"""Several processes started by one command: what is shown, which exit code comes back, and that none is left over."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A process that does as the word of its index says, and writes its own id and that of a helper that it starts.
CHILD = """
import os, signal, subprocess, sys, time
index = int(os.environ["JAX_PROCESS_ID"])
assert os.environ["JAX_NUM_PROCESSES"] == str(len(sys.argv) - 2)
assert os.environ["JAX_COORDINATOR_ADDRESS"].startswith("127.0.0.1:")
assert sys.stdin.read() == ""
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], stdout=-3, stderr=-3)
what = sys.argv[2 + index]
handled = []
def handle(number, frame):
    handled.append(number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL if what == "killed" else handle)
print(f"output of {index}", flush=True)
sys.stderr.write(f"error of {index}\\n")  # one write: print makes two where PYTHONUNBUFFERED is set
sys.stderr.flush()
with open(os.path.join(sys.argv[1], f"{index}.part"), "w") as file:
    file.write(f"{os.getpid()} {helper.pid}")
os.rename(file.name, file.name.replace(".part", ".pid"))
while not all(os.path.exists(os.path.join(sys.argv[1], f"{i}.pid")) for i in range(len(sys.argv) - 2)):
    time.sleep(0.02)
if what == "waits":
    while not handled:
        time.sleep(0.02)
    time.sleep(0.2)  # a signal that comes twice would be noticed
    sys.stderr.write(f"signals: {' '.join(map(str, handled))}\\n")
    sys.stderr.flush()
    code = 75
elif what == "stuck":
    while True:
        time.sleep(1)
elif what.startswith("late"):
    time.sleep(0.3)
    code = int(what[4:])
elif what == "killed":
    time.sleep(600)
else:
    code = int(what)
helper.kill()
sys.exit(code)
"""
LAUNCHER = """
import sys
from jaxtrain.commands import launch
from jaxtrain.commands.processes import Signals
launch._GRACE_SECONDS = 1.0
with Signals() as signals:
    sys.exit(launch.run_processes([sys.executable, *sys.argv[1:]], [{}] * (len(sys.argv) - 3), signals))
"""


def alive(process_id: int) -> bool:
    """Whether a process runs (a zombie, which nobody waits for in a container, does not)."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Launched:
    """`run_processes` over processes that do as they are told."""

    def __init__(self, folder: Path, *what: str):
        self.folder, self.count = folder, len(what)
        (folder / "child.py").write_text(CHILD)
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(folder / "child.py"), str(folder), *what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_start(self) -> None:
        end = time.monotonic() + 60
        while len(list(self.folder.glob("*.pid"))) < self.count:
            assert time.monotonic() < end
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def left_over(self, *, helpers: bool = True) -> list[int]:
        found = [int(word) for path in self.folder.glob("*.pid") for word in path.read_text().split()[: 1 + helpers]]
        assert len(found) == self.count * (1 + helpers)
        end = time.monotonic() + 10
        while any(map(alive, found)) and time.monotonic() < end:
            time.sleep(0.02)
        return [process_id for process_id in found if alive(process_id)]


# id: (what each process does, exit code of the launcher, the process whose failure stops the others)
ENDS = {
    "one was done, one saved": (("75", "late0"), 75, None),
    "the first failure in time counts": (("late3", "5"), 5, "1"),
    "one that does not listen": (("2", "stuck"), 2, "0"),
}


PLAIN = ("one was done, one saved", "the first failure in time counts")
ROWS = [pytest.param(*row, id=name, marks=() if name in PLAIN else pytest.mark.long) for name, row in ENDS.items()]


@pytest.mark.parametrize(("what", "code", "stopper"), ROWS)
def test_exit_code_and_end(tmp_path, what, code, stopper):
    launched = Launched(tmp_path, *what)
    found, out, err = launched.finish()
    assert found == code, err
    assert out == "output of 0\n"
    assert "error of 0\n" in err
    assert re.search(r"^\[1\] error of 1$", err, re.MULTILINE)
    stopped = re.findall(r"jaxtrain: process (\d) of 2 ended with exit code \d; stopping the others\n", err)
    assert stopped == ([] if stopper is None else [stopper])
    assert launched.left_over() == []


@pytest.mark.parametrize(
    ("number", "passed_on"),
    [(signal.SIGINT, 2), (signal.SIGHUP, 15)],
    ids=["ctrl-c", "terminal closed"],
)
def test_a_signal_reaches_each_process_once(tmp_path, number, passed_on):
    launched = Launched(tmp_path, "waits", "waits", "waits")
    launched.wait_for_start()
    launched.process.send_signal(number)
    code, _, err = launched.finish()
    assert code == 75, err
    told = f"signals: {passed_on}"
    assert sorted(line for line in err.splitlines() if "signals" in line) == [f"[1] {told}", f"[2] {told}", told]
    assert "jaxtrain:" not in err, "what was asked for needs no explanation"
    assert launched.left_over() == []


def test_no_process_outlives_a_launcher_that_is_killed(tmp_path):
    launched = Launched(tmp_path, "waits", "stuck")
    launched.wait_for_start()
    launched.process.kill()
    launched.process.communicate()
    assert launched.left_over(helpers=False) == []
    for path in tmp_path.glob("*.pid"):
        os.kill(int(path.read_text().split()[1]), signal.SIGKILL)


# Every device of both processes takes part in the sum.
SCRIPT = """
import sys
from jaxtrain.runtime import distributed

distributed.start(compilation_cache=None)
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
rows = jax.make_array_from_callback(
    (4,), NamedSharding(mesh, PartitionSpec("x")), lambda index: np.arange(4.0, dtype=np.float32)[index]
)
total = float(jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(rows))
words = (jax.process_index(), jax.process_count(), jax.local_device_count(), total, *sys.argv[1:])
sys.stderr.write(f"{' '.join(map(str, words))}\\n")  # one write: print makes many where PYTHONUNBUFFERED is set
"""


@pytest.mark.long
def test_a_script_of_ones_own_is_launched_and_joins(tmp_path):
    (tmp_path / "my.py").write_text(SCRIPT)
    words = ["launch", "--processes", "2", "--emulate", "2", "--", "python", "my.py", "--debug", "a b"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxtrain", *words],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        # The python of an environment that is not activated is not on the path.
        env={**os.environ, "PATH": "/nowhere", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "a b" in line]
    assert sorted(lines) == ["0 2 2 6.0 --debug a b", "[1] 1 2 2 6.0 --debug a b"], done.stderr


@pytest.mark.long
def test_processes_that_wait_for_others_in_vain_say_so(tmp_path):
    """Each of two whose peer never comes: a line and exit 2 within the time limit, neither a hang nor an abort."""
    started = []
    command = [sys.executable, "-m", "jaxtrain", "train", "quickstart", "--emulate", "1", "--run-dir"]
    for index in ("0", "1"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        cluster = {"COORDINATOR_ADDRESS": address, "NUM_PROCESSES": "2", "PROCESS_ID": index}
        found = {**os.environ, **{f"JAX_{name}": value for name, value in cluster.items()}}
        found["JAXTRAIN_JOIN_TIMEOUT_SECONDS"] = "1"
        process = subprocess.Popen([*command, index], stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=found)
        started.append((process, address))
    for process, address in started:
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2, err
        assert err == (
            "jaxtrain: could not join the cluster found through JAX_COORDINATOR_ADDRESS: its processes did not connect "
            f"at {address} within 1 s; check the address and that all processes started\n"
        )
