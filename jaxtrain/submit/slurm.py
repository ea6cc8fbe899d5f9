"""The batch script with which Slurm trains: asks for nodes, warns before the time limit, starts again. No jax here."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.errors import ConfigError
from jaxtrain.submit.slurm_options import check_options, gpus_of_gres
from jaxtrain.submit.slurm_times import parse_time
from jaxtrain.submit.training import check_text

SIGNALS = ("TERM", "USR1", "USR2")
# Stood still or lost a process, and stopped and saved: another start goes on from the last checkpoint. Where a node is
# lost, the others end with the first of them minutes before Slurm notices (SlurmdTimeout, 300 s by default).
RESTARTED = (70, 75)
# Done, and mistakes and numbers that would come again.
_FINAL = (0, 2, 3, 5)
# Processes that save end with 75 one after another. With --kill-on-bad-exit=1 the first of them would have the others
# killed on their way out, and srun would give 143. Where one fails, the others find out by themselves in 25 to 75 s.
_ENDING = "--kill-on-bad-exit=0 --wait=60"
# Slurm looks at its clock every 30 s or so, and documents that the signal may come up to a minute early.
_LEAST_WARNING_SECONDS = 30


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
        most_restarts: starts after the first.
        restarted: exit codes after which the job starts again.
        setup: lines of shell that run before the command, such as `source .venv/bin/activate`.
        sbatch_options, srun_options: further options, each as one word: `--exclusive`, `--container-image=...`.
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
    most_restarts: int = 10
    restarted: Sequence[int] = RESTARTED
    setup: Sequence[str] = ()
    sbatch_options: Sequence[str] = ()
    srun_options: Sequence[str] = ()


def asked_gpus(job: SlurmJob) -> tuple[str, str] | None:
    """The option by which a job asks for the GPUs of a node, and its value, as `8` or `a100:8`; None: by none."""
    if job.gpus_per_node is not None:
        return "--gpus-per-node", job.gpus_per_node
    found = gpus_of_gres(job.sbatch_options)
    return None if found is None else ("--sbatch=--gres", found)


def num_gpus(job: SlurmJob) -> int | None:
    """GPUs of a node of the job, or None where it asks for none.

    Raises:
        ConfigError: the number cannot be read.
    """
    asked = asked_gpus(job)
    if asked is None:
        return None
    option, text = asked
    found = re.fullmatch(r"(?:[\w.+-]+:)?([1-9]\d{0,3})", text, re.ASCII)
    if found is None:
        raise ConfigError(f"{option} {text!r} is no number of GPUs; write 8, or with a type a100:8")
    return int(found[1])


def check_job(job: SlurmJob) -> None:
    """Check what can be known of a job without asking the cluster.

    Raises:
        ConfigError: a value cannot be; names its option.
    """
    texts = {"--job-name": job.name, "--partition": job.partition, "--account": job.account, "--qos": job.qos}
    for option, text in {**texts, "--constraint": job.constraint, "--output": str(job.output)}.items():
        check_text(text, option=option)
    check_text(str(job.folder), option="the current folder")
    for option, words in (("--sbatch", job.sbatch_options), ("--srun", job.srun_options)):
        for word in words:
            check_text(word, option=option)
            if not word.startswith("-"):
                raise ConfigError(f"{option} {word!r} is no option; write it whole, as in {option}=--exclusive")
    check_options(job.sbatch_options)
    if job.gpus_per_node is not None and (found := gpus_of_gres(job.sbatch_options)) is not None:
        raise ConfigError(
            f"--gpus-per-node {job.gpus_per_node} and --sbatch=--gres, for gpu:{found}, both ask for the GPUs of a "
            "node; leave out one"
        )
    if job.mem is not None and re.fullmatch(r"\d{1,12}[KMGT]?", job.mem, re.ASCII) is None:
        raise ConfigError(f"--mem {job.mem!r} is no size of memory; write 64G, or 0 for all of a node's")
    gpus = num_gpus(job)
    if gpus is not None and gpus % job.tasks_per_node:
        near = [count for count in range(1, gpus + 1) if gpus % count == 0]
        raise ConfigError(
            f"--tasks-per-node {job.tasks_per_node} does not divide the {gpus} GPUs of a node; use one of "
            f"{', '.join(map(str, near))}"
        )
    if job.warning_seconds < _LEAST_WARNING_SECONDS:
        raise ConfigError(
            f"--warning-seconds {job.warning_seconds} is too short for a save; use {_LEAST_WARNING_SECONDS} or more"
        )
    for code in job.restarted:
        if code in _FINAL or not 0 < code < 256:
            raise ConfigError(
                f"--restart-at {code}: no start goes on after it; use codes such as 70, 75 or 137 (killed)"
            )
    if job.time is not None:
        limit = parse_time(job.time, option="--time")
        if limit <= job.warning_seconds:
            raise ConfigError(
                f"--time {job.time} is {limit} s, and the processes are told to save {job.warning_seconds} s before it "
                "ends (--warning-seconds); ask for more time"
            )
    if "\\" in str(job.output):
        raise ConfigError(
            f"--output {job.output}: Slurm takes a backslash out of the path, and replaces no %j in it; name a file "
            "in a folder without one"
        )
    if job.output.is_dir():
        raise ConfigError(f"--output {job.output} is a folder; name a file in it, as in {job.output / '%j.out'}")
    parent = job.output.parent
    if "%" not in str(parent) and not parent.is_dir():
        raise ConfigError(f"--output {job.output}: there is no folder {parent}, and Slurm makes none; make it first")


def slurm_script(job: SlurmJob, command: Sequence[str], *, written_by: str) -> str:
    """Write the script.

    Args:
        job: checked by `check_job`.
        command: program and words that every process runs.
        written_by: the line that made it, for people.

    Returns:
        A script for bash, which `sbatch` takes as it is.
    """
    return "\n".join([*_head(job, written_by), "", *_start(job), *_setup(job), *_run(job, command), ""])


def _head(job: SlurmJob, written_by: str) -> list[str]:
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
    warning = f"SIG{job.signal} {job.warning_seconds} s before the time limit"
    return [
        "#!/bin/bash",
        f"# Written by: {' '.join(written_by.split())}",
        *(f"#SBATCH {_option(f'{name}={value}')}" for name, value in asked.items() if value is not None),
        *(f"#SBATCH {_option(option)}" for option in job.sbatch_options),
        f"# The processes get {warning}: they save, and end with 75.",
        f"#SBATCH --signal={job.signal}@{job.warning_seconds}",
        "# The job starts again under the same number after the loss of a node, and adds to the same output.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]


def _option(text: str) -> str:
    """Quotes an option for sbatch, which reads quotes as a shell does, and a backslash inside of them as well."""
    return shlex.quote(text.replace("\\", "\\\\"))


def _start(job: SlurmJob) -> list[str]:
    return [
        "restarts=${SLURM_RESTART_COUNT:-0}",
        f"most_restarts={job.most_restarts}",
        'echo "jaxtrain: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart $restarts of at most $most_restarts"',
        "# Slurm itself starts a job again without end.",
        'if [ "$restarts" -gt "$most_restarts" ]; then',
        '  echo "jaxtrain: given up after $most_restarts restarts; submit the script again to go on" >&2',
        "  exit 1",
        "fi",
    ]


def _setup(job: SlurmJob) -> list[str]:
    lines: list[str] = []
    for text in job.setup:
        # On a line of its own, since the text may end with a comment.
        lines += ["", text, 'code=$?; [ "$code" -eq 0 ] || { echo "jaxtrain: --setup failed" >&2; exit "$code"; }']
    if lines:
        lines.append("set +e  # where a line above set -e: what srun returns decides below")
    return lines


def _run(job: SlurmJob, command: Sequence[str]) -> list[str]:
    options = [_ENDING]
    if job.nodes * job.tasks_per_node > 1:
        options.append("--label")
    if job.cpus_per_task is not None:
        # Since Slurm 22.05 steps do not take it from the job.
        options.append(f"--cpus-per-task={job.cpus_per_task}")
    options += [shlex.quote(option) for option in job.srun_options]
    return [
        "",
        "# Processes that stop end one after another: none is killed for the exit code of another, but all end soon.",
        f"srun {' '.join(options)} \\",
        f"  {shlex.join(command)}",
        "code=$?",
        "",
        "# 75: stopped and saved. 70: stood still, or lost a process or a node. Another start goes on from the newest",
        "# checkpoint. Every code that is not listed here is handed on.",
        'case "$code" in',
        f"  {' | '.join(map(str, sorted(set(job.restarted))))})",
        '    if [ "$restarts" -ge "$most_restarts" ]; then',
        '      echo "jaxtrain: exit code $code, and no restart is left of $most_restarts; submit again to go on" >&2',
        "      # Not 75, at which a cluster with RequeueExit=75 would start the job again without end.",
        "      exit 1",
        "    fi",
        "    # At the time limit, or cancelled: processes that save quickly end before Slurm ends this script.",
        '    state=$(squeue --noheader --states=all --format=%T --jobs="$SLURM_JOB_ID" 2>/dev/null)',
        '    case "$state" in',
        "      CANCELLED | COMPLETING | TIMEOUT)",
        '        echo "jaxtrain: Slurm itself ends the job ($state), so this script does not start it again" >&2',
        '        exit "$code"',
        "        ;;",
        "    esac",
        '    scontrol requeue "$SLURM_JOB_ID" ||',
        '      echo "jaxtrain: Slurm does not start the job again; submit the script again to go on" >&2',
        "    ;;",
        "esac",
        'exit "$code"',
    ]
