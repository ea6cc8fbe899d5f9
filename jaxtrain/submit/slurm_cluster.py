"""What Slurm says of its cluster, asked through its own commands where they are. No jax here."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtrain.errors import ConfigError
from jaxtrain.submit.slurm import SlurmJob, asked_gpus, num_gpus
from jaxtrain.submit.slurm_times import parse_partition_limit, parse_time, shown_time

# A controller that is busy answers within seconds; one that is down never does.
_SECONDS = 30


@dataclass(frozen=True)
class Nodes:
    """Equal nodes of a partition.

    Attributes:
        partition: its name.
        is_default: whether jobs that name no partition go there.
        count: number of these nodes.
        most_nodes: the most that a job of the partition may have; None: no limit.
        limit_seconds: the longest time of a job; None: no limit.
        cpus: CPU cores of a node.
        gpus: type -> GPUs of a node.
    """

    partition: str
    is_default: bool
    count: int
    most_nodes: int | None
    limit_seconds: int | None
    cpus: int
    gpus: dict[str, int]


def ask_cluster() -> list[Nodes] | str:
    """Ask `sinfo` for the nodes of every partition.

    Returns:
        The nodes, or the reason why they are not known, in words.
    """
    if shutil.which("sinfo") is None:
        return "no sinfo on PATH"
    # All: jobs may go to partitions that an administrator keeps out of the usual list.
    command = ["sinfo", "--noheader", "--exact", "--all", "--Node", "--format=%P|%l|%s|%c|%G|%N"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"sinfo did not answer ({type(error).__name__})"
    if done.returncode:
        return f"sinfo: {last_line(done.stderr) or f'exit code {done.returncode}'}"
    return _parse_nodes(done.stdout)


def _parse_nodes(text: str) -> list[Nodes]:
    """Read the lines of `sinfo --Node`: one for each node and partition."""
    found: dict[tuple[str, ...], int] = {}
    for line in text.splitlines():
        *fields, _ = (part.strip() for part in line.split("|"))
        if len(fields) == 5:
            found[tuple(fields)] = found.get(tuple(fields), 0) + 1
    return [
        Nodes(
            partition=partition.rstrip("*"),
            is_default=partition.endswith("*"),
            count=count,
            most_nodes=int(most) if (most := size.rpartition("-")[2]).isdigit() else None,
            limit_seconds=parse_partition_limit(limit),
            cpus=_number(cpus),
            gpus=_gpus(resources),
        )
        for (partition, limit, size, cpus, resources), count in found.items()
    ]


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def _gpus(resources: str) -> dict[str, int]:
    """GPUs by type in a list of generic resources: `gpu:2080ti:8(S:0-1),nvme:1` has 8 of 2080ti."""
    found: dict[str, int] = {}
    for kind, count in re.findall(r"(?:^|,)gpu(?::([\w.+-]+))?:(\d+)(?=[(,]|$)", resources):
        found[kind] = found.get(kind, 0) + int(count)
    return found


def check_fits(job: SlurmJob, nodes: Sequence[Nodes]) -> None:
    """Check that a cluster could ever run a job, so that it does not wait in the queue for nothing.

    Args:
        job: checked by `check_job`.
        nodes: what `ask_cluster` found.

    Raises:
        ConfigError: the partition does not exist, or has not such nodes, or not so many, or less time.
    """
    names = sorted({one.partition for one in nodes})
    # The site or the user may have set a default of their own.
    partition = job.partition or os.environ.get("SBATCH_PARTITION")
    if partition is None:
        wanted = sorted({one.partition for one in nodes if one.is_default})
        if not wanted:
            raise ConfigError(f"this cluster has no default partition; add --partition with one of {', '.join(names)}")
    else:
        wanted = partition.split(",")
        for name in wanted:
            if name not in names:
                raise ConfigError(
                    f"--partition {name}: this cluster has no such partition; sinfo lists {', '.join(names)}"
                )
    # Of several partitions the job starts in the first that has room: one that fits is enough.
    problems = [_problem(job, name, [one for one in nodes if one.partition == name]) for name in wanted]
    if all(problems):
        raise ConfigError(next(filter(None, problems)))


def _problem(job: SlurmJob, name: str, nodes: Sequence[Nodes]) -> str | None:
    """Why a partition cannot run a job; None where it can."""
    total, limit = sum(one.count for one in nodes), nodes[0].limit_seconds
    if job.nodes > total:
        return f"--nodes {job.nodes}: partition {name} has {_counted(total)}; ask for fewer, or another --partition"
    if nodes[0].most_nodes is not None and job.nodes > nodes[0].most_nodes:
        return f"--nodes {job.nodes}: a job of partition {name} gets at most {nodes[0].most_nodes}; ask for fewer"
    if job.time is not None and limit is not None and parse_time(job.time, option="--time") > limit:
        return (
            f"--time {job.time}: partition {name} ends jobs after {shown_time(limit)}; ask for at most that: the "
            "job is started again and goes on"
        )
    if job.time is None and limit is not None and limit <= job.warning_seconds:
        return f"partition {name} ends jobs after {shown_time(limit)}; lower --warning-seconds {job.warning_seconds}"
    gpus = num_gpus(job)
    option, text = asked_gpus(job) or ("", "")
    kind = text.rpartition(":")[0]
    cpus = (job.cpus_per_task or 1) * job.tasks_per_node
    able = sum(one.count for one in nodes if gpus is None or _has_gpus(one, kind, gpus))
    if able < job.nodes:
        most = max((one.gpus.get(kind, 0) if kind else sum(one.gpus.values())) for one in nodes)
        return (
            f"{option} {text}: of the {_counted(total)} of partition {name} {able} have so many "
            f"(the most is {most}); ask for fewer, or another --partition"
        )
    able = sum(one.count for one in nodes if one.cpus >= cpus and (gpus is None or _has_gpus(one, kind, gpus)))
    if able < job.nodes:
        return (
            f"{job.tasks_per_node} x {job.cpus_per_task or 1} CPU cores (--tasks-per-node, --cpus-per-task): of the "
            f"{_counted(total)} of partition {name} {able} can give so many (the most is "
            f"{max(one.cpus for one in nodes)}); ask for fewer"
        )
    return None


def _has_gpus(nodes: Nodes, kind: str, count: int) -> bool:
    return (nodes.gpus.get(kind, 0) if kind else sum(nodes.gpus.values())) >= count


def _counted(nodes: int) -> str:
    return f"{nodes} {'node' if nodes == 1 else 'nodes'}"


def submit_script(script: str) -> str:
    """Hand a script to `sbatch`.

    Returns:
        The number of the job.

    Raises:
        ConfigError: there is no `sbatch`, or it refused the script.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "no sbatch on PATH, so nothing was submitted; run this where Slurm's commands are (a login node), or "
            "without --run and submit what it prints"
        )
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=script,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env=_environment(script),
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"sbatch did not answer within {_SECONDS} s; look with squeue whether the job is there"
        ) from None
    except OSError as error:
        raise ConfigError(f"sbatch cannot be started: {error.strerror}") from None
    if done.returncode:
        raise ConfigError(f"Slurm refused the job: {last_line(done.stderr) or f'exit code {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]


def _environment(script: str) -> dict[str, str]:
    """The environment for sbatch, and so of the job, without what would stand above the script.

    Slurm leaves variables that it does not set: a job that another one submits would have its number of restarts. Of
    the variables of sbatch, which it puts above the lines of a script, those of options that the script sets are left
    out.
    """
    inside = "SLURM_JOB_ID" in os.environ

    def stays(name: str) -> bool:
        if name.startswith("SBATCH_"):
            return re.search(rf"^#SBATCH '?{_option_of(name)}\b", script, re.MULTILINE) is None
        return not (inside and name.startswith("SLURM_")) or name in ("SLURM_CONF", "SLURM_CLUSTERS")

    return {name: value for name, value in os.environ.items() if stays(name)}


def _option_of(variable: str) -> str:
    """The option of a variable of sbatch: --partition of SBATCH_PARTITION."""
    others = {"SBATCH_TIMELIMIT": "--time", "SBATCH_NO_REQUEUE": "--requeue", "SBATCH_MEM_PER_NODE": "--mem"}
    return others.get(variable) or re.escape("--" + variable.removeprefix("SBATCH_").lower().replace("_", "-"))


def last_line(text: str) -> str:
    """The last line of what a command of Slurm said, without the name of the command."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^\w+: (error|fatal): ", "", lines[-1]) if lines else ""
