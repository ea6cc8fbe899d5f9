"""What `jaxtrain submit slurm` writes, unchanged on a real Slurm of two nodes on this host, and how its jobs end.

One test, because all jobs share a cluster and wait side by side. Where a job's end is decided by its script and not by
training, a program of a few lines stands in for `jaxtrain`.
"""

import os
import re
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxtrain.cli import main

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "slurm_cluster.sh"
# Slurm's daemons are in /usr/sbin, which is not on every path.
INSTALLED = shutil.which("slurmctld", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is not None
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not INSTALLED, reason="slurmctld is not installed: apt-get install slurm-wlm to run it"),
]
NODE = "zzz2"
# A batch takes a fifth of a second, so that jobs which train for minutes leave the machine to other tests.
TINY = [
    *("digits_mlp", "data={call: 'watched_parts:read', args: {folder: .}}", "model={kind: mlp, hidden_dims: [8]}"),
    *("train.steps=1000000", "train.global_batch_size=4", "parallel.fsdp=2"),
    *("parallel.max_replicated_fraction=1", "evaluation.every=null", "logging.report=false"),
    *("logging.every=5", "checkpoint.every=20"),
]
# Programs in place of jaxtrain: one ends at once, one at SIGTERM.
ENDS = '#!/bin/bash\necho "words: $*"\nexit {code}\n'
WAITS = """#!/bin/bash
trap '' USR1
trap 'echo "stopped by TERM"; exit 75' TERM
echo "words: $*"
while :; do sleep 0.2; done
"""

# Options that the cluster cannot run: what Slurm says.
REFUSED = {
    "--partition nope": "Invalid partition name specified",
    "--sbatch=--nonsense --run": "unrecognized option '--nonsense'",
}


class Cluster:
    """Two nodes, and a thread that does not let jobs wait for the two minutes after which Slurm starts them again."""

    def __init__(self, folder: Path, work: Path):
        self.folder, self.work = folder, work
        self.shows(SCRIPT, "start", folder)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hurry, daemon=True)
        self._thread.start()

    @staticmethod
    def shows(*command: object) -> str:
        """What a command prints."""
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _hurry(self) -> None:
        seen: dict[str, float] = {}
        while not self._ended.wait(0.5):
            told = subprocess.run(["squeue", "-h", "-t", "PD", "-o", "%i %r"], capture_output=True, text=True).stdout
            waiting = {line.split()[0] for line in told.splitlines() if "BeginTime" in line}
            seen = {job: seen.get(job, time.monotonic()) for job in waiting}
            for job, since in seen.items():
                # Earlier, Slurm would start it while it still ends, and fail.
                if time.monotonic() - since > 4:
                    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.shows(SCRIPT, "stop", self.folder)

    def submit(
        self, capsys: pytest.CaptureFixture[str], name: str, *words: str, program: str | None = None, before: str = ":"
    ) -> str:
        """Number of the job that `jaxtrain submit slurm --run` made; the program stands in for jaxtrain.

        `before` is a line of shell in the script of a job with such a program.
        """
        setup: list[str] = []
        if program is not None:
            place = self.work / "bin" / name / "jaxtrain"
            place.parent.mkdir(parents=True)
            place.write_text(program)
            place.chmod(place.stat().st_mode | stat.S_IXUSR)
            setup = ["--setup", f'export PATH="$PWD/bin/{name}:$PATH"  # {name}', "--setup", before]
        capsys.readouterr()
        code = main(["submit", "slurm", *words, "--job-name", name, "--run-dir", f"runs/{name}", *setup, "--run"])
        told = capsys.readouterr()
        assert code == 0, told.err
        assert told.out.strip().isdigit()
        return told.out.strip()

    def output(self, job: str) -> str:
        found = list(self.work.glob(f"*-{job}.out"))
        return found[0].read_text() if found else ""

    def job(self, number: str) -> dict[str, str]:
        """State, exit code and restarts of a job, and more, as Slurm has them."""
        words = self.shows("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, what: str, job: str, holds: Callable[[], object], *, seconds: float = 240) -> None:
        """Wait until something holds."""
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < seconds, f"{what}: {self.job(job)}\n{self.output(job)[-3000:]}"
            time.sleep(0.3)

    def ends(self, job: str) -> tuple[str, str, str]:
        """State, exit code and number of restarts of a job once it is over."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        self.wait("the end of a job", job, lambda: self.job(job)["JobState"] in over)
        return tuple(self.job(job)[key] for key in ("JobState", "ExitCode", "Restarts"))

    def is_started_again(self, job: str, restarts: int) -> None:
        line = f"restart {restarts} of at most"
        self.wait(line, job, lambda: line in self.output(job))

    def trains(self, job: str, *, start: int = 0) -> None:
        """Waits until a start of a job has trained some steps; `start` counts from 0."""

        def has_trained() -> bool:
            last = self.output(job).split("restart ")[start + 1 :]
            return bool(last) and len(re.findall(r"step \d+/1000000", last[0])) >= 3

        self.wait(f"steps of start {start}", job, has_trained)

    def lose_node(self, job: str) -> None:
        """Kill the daemon of the second node, and what it started for a job, as if the machine were gone."""
        found = [int((self.folder / f"slurmd-{NODE}.pid").read_text())]
        for place in Path("/proc").glob("[0-9]*"):
            try:
                variables = (place / "environ").read_bytes().split(b"\0")
                parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if {f"SLURM_JOB_ID={job}".encode(), f"SLURMD_NODENAME={NODE}".encode()} <= set(variables):
                found += [parent, int(place.name)]
        assert len(found) > 2
        for process in found:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Iterator[Cluster]:
    # A name that a shell or sbatch would take apart.
    work = tmp_path / "it's a $HOME, 100 % mine"
    work.mkdir()
    monkeypatch.chdir(work)
    folder = tmp_path / "slurm"
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    # The end of a lost node's job is waited for this long, not 30 s.
    monkeypatch.setenv("SLURM_CLUSTER_LINES", "KillWait=8")
    # `watched_parts` waits as long as this file says.
    (work / "0").write_text("0.2")
    modules = [ROOT, ROOT / "tests" / "faults", *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, modules)))
    made = Cluster(folder, work)
    yield made
    made.close()
    assert not folder.exists()


def resumed_step(text: str) -> int:
    return int(re.findall(r"resuming step (\d+)", text)[-1])


def saved_step(text: str) -> int:
    return int(re.findall(r"stopped after step (\d+) of", text)[-1])


def test_events_on_a_real_cluster(cluster, capsys):
    def submit(name, *words, program=None, before=":"):
        words = words if program is None else ("quickstart", *words)
        return cluster.submit(capsys, name, *words, program=program, before=before)

    trained = submit(
        *("trained", *TINY, "--nodes", "2", "--emulate", "2", "--time", "50", "--srun=--wait=8"),
        *("--signal", "USR1", "--warning-seconds", "60"),
    )
    # Words that a shell would take apart. Slurm ends processes and script at once: this script is late, as one on a
    # loaded node may be.
    hard = ['data.path=it\'s "$HOME" `id` \\ %j', "name=a b"]
    cancelled = submit("cancelled", *hard, "--nodes", "2", program=WAITS, before="trap '' TERM")
    requeued = submit("requeued", "--nodes", "2", "--time", "9", program=WAITS)
    again = submit("again", "--max-restarts", "1", program=ENDS.format(code=75))

    # What the cluster cannot run is one line.
    for options, line in REFUSED.items():
        capsys.readouterr()
        code = main(["submit", "slurm", "quickstart", "train.global_batch_size=8", *options.split()])
        told = capsys.readouterr()
        assert (code, told.out) == (2, ""), options
        assert told.err.startswith("jaxtrain: Slurm refused the job: "), told.err
        assert told.err.endswith(f"{line}\n"), told.err
        assert told.err.count("\n") == 1, options

    # Exit code 75 starts again as often as was asked for, and then ends with 1.
    cluster.is_started_again(requeued, 0)
    cluster.shows("scontrol", "requeue", requeued)
    assert cluster.ends(again) == ("FAILED", "1:0", "1")
    assert cluster.output(again).endswith("exit code 75, and no restart is left of 1; submit again to resume\n")

    line = f"words: train quickstart {' '.join(hard)} --run-dir {cluster.work}/runs/cancelled"
    cluster.wait("the program", cancelled, lambda: cluster.output(cancelled).count(line) == 2)
    cluster.shows("scancel", cancelled)
    # A job that Slurm ends is not started again by its script, though its processes say that they saved.
    assert cluster.ends(cancelled)[::2] == ("CANCELLED", "0"), cluster.output(cancelled)
    cluster.wait("its script", cancelled, lambda: "so this script does not start it again" in cluster.output(cancelled))
    assert "stopped by TERM" in cluster.output(cancelled)

    # A training that is warned saves, and its job starts again and goes on. Slurm sends the warning up to half a minute
    # early; a limit that is moved near sends it at the next look.
    cluster.trains(trained)
    minutes = int(float(cluster.job(trained)["RunTime"].split(":")[1])) + 2
    cluster.shows("scontrol", "update", f"JobId={trained}", f"TimeLimit={minutes}")

    # The administrator's requeue is one restart, though the script asks for one as well.
    cluster.is_started_again(requeued, 1)
    assert cluster.output(requeued).count("stopped by TERM") == 2
    cluster.shows("scancel", requeued)
    assert cluster.ends(requeued)[::2] == ("CANCELLED", "1")

    cluster.wait("the save", trained, lambda: "stopped after" in cluster.output(trained))
    cluster.is_started_again(trained, 1)
    cluster.shows("scontrol", "update", f"JobId={trained}", "TimeLimit=50")
    cluster.trains(trained, start=1)
    assert resumed_step(cluster.output(trained)) == saved_step(cluster.output(trained))
    # A node is lost: the other process ends with 70 or jax's 134, and once the node is back the job goes on from its
    # last save.
    cluster.lose_node(trained)
    cluster.wait("requeue", trained, lambda: cluster.job(trained)["Restarts"] == "2")
    cluster.shows(SCRIPT, "restart-node", cluster.folder, NODE)
    cluster.trains(trained, start=2)
    first, last = re.findall(r"resuming step (\d+)", cluster.output(trained))
    assert int(last) >= int(first)
    assert int(last) % 20 == 0 or last == first

    # The user cancels: it saves once more, and does not start again.
    cluster.shows("scancel", trained)
    assert cluster.ends(trained)[::2] == ("CANCELLED", "2")
    assert saved_step(cluster.output(trained)) > int(last)
