"""The batch script with which Slurm trains: asks for nodes, warns before the time limit, starts again. No jax here."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.errors import ConfigError

SIGNALS = ("TERM", "USR1", "USR2")
# Stood still or lost a process, and stopped and saved: another start resumes from the last checkpoint. jax aborts
# (134: SIGABRT) a process whose peers are lost, minutes before Slurm notices (SlurmdTimeout, 300 s by default).
RESTARTED = (70, 75, 134)
# Processes that save end with 75 one after another. With --kill-on-bad-exit=1 the first of them would have the others
# killed on their way out, and srun would give 143. Where one fails, the others find out by themselves within some 25 s.
_ENDING = "--kill-on-bad-exit=0 --wait=60"
# A controller that is busy answers within seconds; one that is down never does.
_SECONDS = 60


@dataclass(frozen=True)
class SlurmJob:
    """What a job asks Slurm for; a value of None is left to the cluster.

    Attributes:
        name: of the job.
        folder: absolute path in which the command runs; relative paths of the config begin there.
        output: absolute path of the file that gets what the job prints; `%j` is the number of the job.
        nodes: number of nodes.
        tasks_per_node: processes on each node.
        gpus_per_node: as `8`, or with a type, `a100:8`.
        cpus_per_task: CPU cores of a process.
        mem: memory of a node, as in `64G`; 0: all of it.
        partition, account, qos, constraint: as `sbatch` takes them.
        time: limit of the job in one of Slurm's forms.
        signal: name of the signal that warns the processes before the limit.
        warning_seconds: how long before the limit.
        max_restarts: starts after the first.
        restart_at: exit codes after which the job starts again.
        setup: lines of shell that run before the command, such as `source .venv/bin/activate`.
        sbatch, srun: further options, each as one word: `--exclusive`, `--container-image=...`.
    """

    name: str
    folder: Path
    output: Path
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    signal: str = "TERM"
    warning_seconds: int = 120
    max_restarts: int = 10
    restart_at: Sequence[int] = RESTARTED
    setup: Sequence[str] = ()
    sbatch: Sequence[str] = ()
    srun: Sequence[str] = ()


def num_gpus(gpus_per_node: str | None, tasks_per_node: int) -> int | None:
    """Return the GPUs of a node, given as `8` or `a100:8`, or None if none are asked for.

    Raises:
        ConfigError: the number cannot be read, or the processes of a node do not divide it.
    """
    if gpus_per_node is None:
        return None
    match = re.fullmatch(r"(?:[\w.+-]+:)?([1-9]\d{0,3})", gpus_per_node, re.ASCII)
    if match is None:
        raise ConfigError(f"--gpus-per-node {gpus_per_node} is not a number of GPUs; write 8, or a100:8")
    if int(match[1]) % tasks_per_node:
        raise ConfigError(f"--tasks-per-node {tasks_per_node} does not divide the {match[1]} GPUs of a node")
    return int(match[1])


def sbatch_options(job: SlurmJob) -> list[str]:
    """The options of `sbatch` for a job, each as one word.

    Raises:
        ConfigError: a further option is one that the script sets itself, or an array; or no folder takes the output.
    """
    asked = {
        "--job-name": job.name,
        "--partition": job.partition,
        "--account": job.account,
        "--qos": job.qos,
        "--constraint": job.constraint,
        "--nodes": job.nodes,
        "--ntasks-per-node": job.tasks_per_node,
        "--gpus-per-node": job.gpus_per_node,
        "--cpus-per-task": job.cpus_per_task,
        "--mem": job.mem,
        "--time": job.time,
        "--chdir": job.folder,
        "--output": job.output,
    }
    restarts = [f"--signal={job.signal}@{job.warning_seconds}", "--requeue", "--open-mode=append"]
    own = {*asked, *(option.partition("=")[0] for option in restarts), "--no-requeue", "--array"}
    for option in job.sbatch:
        name = option.partition("=")[0]
        if name in own:
            raise ConfigError(f"--sbatch={option}: the script sets {name} itself, or starts one job per run directory")
    parent = job.output.parent
    if "%" not in str(parent) and not parent.is_dir():
        raise ConfigError(f"--output {job.output}: folder {parent} does not exist; create it, Slurm does not")
    return [*(f"{name}={value}" for name, value in asked.items() if value is not None), *job.sbatch, *restarts]


def slurm_script(job: SlurmJob, command: Sequence[str], *, written_by: str) -> str:
    """Write the script.

    Args:
        job: what it asks for.
        command: program and words that every process runs.
        written_by: the line that made it, for people.

    Returns:
        A script for bash, which `sbatch` takes as it is.
    """
    options = [_ENDING]
    if job.nodes * job.tasks_per_node > 1:
        options.append("--label")
    if job.cpus_per_task is not None:
        # Since Slurm 22.05 steps do not take it from the job.
        options.append(f"--cpus-per-task={job.cpus_per_task}")
    return _SCRIPT.format(
        written_by=" ".join(written_by.split()),
        # sbatch reads quotes as a shell does, and a backslash inside of them as well.
        options="\n".join("#SBATCH " + shlex.quote(one.replace("\\", "\\\\")) for one in sbatch_options(job)),
        max_restarts=job.max_restarts,
        setup="".join(f"{line}\n{_SETUP}\n" for line in job.setup),
        srun=" ".join([*options, *map(shlex.quote, job.srun)]),
        command=shlex.join(command),
        codes=" | ".join(map(str, sorted(set(job.restart_at)))),
    )


_SETUP = 'code=$?; [ "$code" -eq 0 ] || { echo "jaxtrain: --setup failed" >&2; exit "$code"; }'
_SCRIPT = """\
#!/bin/bash
# Written by: {written_by}
# The processes are warned by a signal before the time limit: they save, and end with 75. The job starts again under
# the same number, also after the loss of a node, and adds to the same output.
{options}

restarts=${{SLURM_RESTART_COUNT:-0}}
max_restarts={max_restarts}
echo "jaxtrain: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart $restarts of at most $max_restarts"
# Slurm itself starts a job again without end.
if [ "$restarts" -gt "$max_restarts" ]; then
  echo "jaxtrain: given up after $max_restarts restarts; submit the script again to resume" >&2
  exit 1
fi
{setup}set +e  # where a line above set -e: what srun returns decides below

# Processes that stop end one after another: none is killed for the exit code of another, but all end soon.
srun {srun} \\
  {command}
code=$?

# 75: stopped and saved. 70, 134: stood still, or lost a process or a node. Another start goes on from the newest
# checkpoint. Every code that is not listed here is handed on.
case "$code" in
  {codes})
    if [ "$restarts" -ge "$max_restarts" ]; then
      echo "jaxtrain: exit code $code, and no restart is left of $max_restarts; submit again to resume" >&2
      # Not 75, at which a cluster with RequeueExit=75 would start the job again without end.
      exit 1
    fi
    # At the time limit, or cancelled: processes that save quickly end before Slurm ends this script.
    state=$(squeue --noheader --states=all --format=%T --jobs="$SLURM_JOB_ID" 2>/dev/null)
    case "$state" in
      CANCELLED | COMPLETING | TIMEOUT)
        echo "jaxtrain: Slurm itself ends the job ($state), so this script does not start it again" >&2
        exit "$code"
        ;;
    esac
    scontrol requeue "$SLURM_JOB_ID" ||
      echo "jaxtrain: Slurm does not start the job again; submit the script again to resume" >&2
    ;;
esac
exit "$code"
"""


def ask_sbatch(job: SlurmJob, script: str, *, submit: bool) -> str | None:
    """Hand a script to `sbatch`, which refuses what the cluster could never run.

    Args:
        job: what the script asks for.
        script: its text.
        submit: else the script is only checked, where there is a cluster.

    Returns:
        The number of the job; None where it was only checked.

    Raises:
        ConfigError: there is no `sbatch` to submit with, or it refused the script.
    """
    if shutil.which("sbatch") is None:
        if not submit:
            return None
        raise ConfigError("no sbatch on PATH, so nothing was submitted; use -o FILE, and sbatch FILE on a login node")
    # Those of a job around this one: its number of restarts would be taken over.
    keep = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    keep |= {name: os.environ[name] for name in ("SLURM_CONF", "SLURM_CLUSTERS") if name in os.environ}

    def ask(way: str) -> subprocess.CompletedProcess[str]:
        # Options of the command line stand above the variables of sbatch (SBATCH_PARTITION), which stand above a
        # script's.
        command = ["sbatch", way, *sbatch_options(job)]
        return subprocess.run(command, input=script, capture_output=True, text=True, timeout=_SECONDS, env=keep)

    try:
        # Without the first, a job that asks for what there is not is taken, and waits without end.
        done = ask("--test-only")
        if done.returncode and not submit and re.search("fatal:|Unable to contact", done.stderr):
            return None  # there are Slurm's commands here, and no cluster
        if submit and not done.returncode:
            done = ask("--parsable")
    except subprocess.TimeoutExpired:
        raise ConfigError(f"sbatch did not answer within {_SECONDS} s; see squeue whether the job is there") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("Try ")]
        raise ConfigError(f"Slurm refused the job: {re.sub(r'^sbatch: (error: )?', '', (lines or ['no reason'])[-1])}")
    return done.stdout.strip().partition(";")[0] if submit else None
