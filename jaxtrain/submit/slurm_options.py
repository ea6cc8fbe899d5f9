"""Options of `sbatch` that are given as they are: those that the script sets itself, and GPUs. No jax here."""

import re
from collections.abc import Sequence

from jaxtrain.errors import ConfigError

# Each option that the script sets: its letter, and the option of ours in its place; None: the restarts need its value.
_SET = {
    "job-name": ("J", "--job-name"),
    "nodes": ("N", "--nodes"),
    "ntasks": ("n", "--nodes and --tasks-per-node"),
    "ntasks-per-node": (None, "--tasks-per-node"),
    "tasks-per-node": (None, "--tasks-per-node"),
    "gpus-per-node": (None, "--gpus-per-node"),
    "cpus-per-task": ("c", "--cpus-per-task"),
    "mem": (None, "--mem"),
    "partition": ("p", "--partition"),
    "account": ("A", "--account"),
    "qos": ("q", "--qos"),
    "constraint": ("C", "--constraint"),
    "time": ("t", "--time"),
    "output": ("o", "--output"),
    "signal": (None, "--signal and --warning-seconds"),
    "chdir": ("D", None),
    "requeue": (None, None),
    "no-requeue": (None, None),
    "open-mode": (None, None),
}
# What the script writes too, and a job without a limit, of which there is nothing to be warned.
_AS_WRITTEN = re.compile(r"--requeue|--open-mode=append|(--time=|-t ?)(0|UNLIMITED|INFINITE)", re.IGNORECASE)
_LETTERS = {letter: name for name, (letter, _) in _SET.items() if letter is not None} | {"a": "array"}
# Options of sbatch with whose names those of options above begin.
_SHORTER = ("gpus",)
# Letters of options without a value, behind which another letter may stand.
_FLAGS = "HOQVWhsv"
# One of a list of generic resources: gpu, gpu:8, gpu:a100 or gpu:a100:8.
_GPUS = re.compile(r"(?:^|,)gpu(?::(?!\d+(?:,|$))([\w.+-]+))?(?::(\d+))?(?=,|$)", re.ASCII)


def check_options(options: Sequence[str]) -> None:
    """Check that no further option of sbatch stands against one that the script sets.

    Args:
        options: each as one word: `--exclusive`, `-xnode1`.

    Raises:
        ConfigError: one does, or asks for an array of jobs.
    """
    for word in options:
        name = _name(word)
        if name == "array":
            raise ConfigError(
                f"--sbatch {word}: all jobs of an array would train in one run directory; submit one job per run, each "
                "with a --run-dir of its own"
            )
        if name in _SET and not _AS_WRITTEN.fullmatch(word):
            ours = _SET[name][1]
            instead = "its restarts need it as it is; leave it out" if ours is None else f"use {ours} instead"
            raise ConfigError(f"--sbatch {word}: the script sets --{name} itself; {instead}")


def _name(word: str) -> str:
    """The long name of an option, which sbatch takes by its letter or by the first letters of its name as well.

    A beginning that several names share is one of those that the script sets: sbatch itself would refuse it.
    """
    if not word.startswith("--"):
        letter = word[1:].lstrip(_FLAGS)[:1]
        return _LETTERS.get(letter, letter)
    given = word[2:].partition("=")[0]
    if given in _SET or given in _SHORTER or not given:
        return given
    return next((name for name in ("array", *_SET) if name.startswith(given)), given)


def gpus_of_gres(options: Sequence[str]) -> str | None:
    """The GPUs of a node that `--gres` asks for, as `8` or `a100:8`; None where it asks for none.

    Types are left out where there are several.
    """
    found = [
        (kind, int(count or 1))
        for word in options
        if (resources := re.match(r"--gres=(.*)", word)) is not None
        for kind, count in _GPUS.findall(resources[1])
    ]
    if not found:
        return None
    kinds, total = {kind for kind, _ in found}, sum(count for _, count in found)
    kind = kinds.pop() if len(kinds) == 1 else ""
    return f"{kind}:{total}" if kind else str(total)


def asks_for_gpus(options: Sequence[str]) -> bool:
    """Return whether any option asks for GPUs, of the job, a task or a node."""
    ways = rf"--gpus(-per-task|-per-socket)?(=|$)|--tres-per-task=.*gres[/:]gpu|-[{_FLAGS}]*G"
    named = any(re.match(ways, word) for word in options)
    return named or gpus_of_gres(options) is not None
