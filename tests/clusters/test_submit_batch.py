"""A batch that the devices of a job do not divide is refused before a cluster sees it, and no example has one."""

import re
import shlex
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
POD = ("--image", "example.com/jaxtrain:0.1.0", "--volume", "runs:/runs")
REFUSED = {
    "slurm": (("slurm", "--nodes", "2", "--gpus-per-node", "8"), 16),
    "slurm, degrees": (("slurm", "parallel.fsdp=4", "--nodes", "2", "--gpus-per-node", "8"), 16),
    "slurm, emulated": (("slurm", "--nodes", "2", "--emulate", "8"), 16),
    "job": (("job", *POD, "--hosts", "2", "--gpus", "8"), 16),
    "job, accumulation": (("job", *POD, "--hosts", "2", "--gpus", "4", "train.accumulation_steps=2"), 16),
    "jobset": (("jobset", *POD, "--tpu", "v5e/4x4"), 16),
}


@pytest.mark.parametrize(("words", "multiple"), REFUSED.values(), ids=REFUSED)
def test_a_batch_that_does_not_divide_is_refused(cli, tmp_path, monkeypatch, words, multiple):
    monkeypatch.chdir(tmp_path)
    kind, *rest = words
    answer = cli("submit", kind, "quickstart", *rest)
    assert (answer.code, answer.out) == (2, "")
    assert "train.global_batch_size=8 does not divide by data x fsdp x accumulation_steps = " in answer.err
    assert answer.err.endswith(f"; use {multiple}\n")
    assert cli("submit", kind, "quickstart", *rest, "train.global_batch_size=16").code == 0


def examples():
    """Every line of the pages and of the command line's help that submits something."""
    pages = [line for name in ("slurm.md", "kubernetes.md") for line in (DOCS / name).read_text().splitlines()]
    found = [line.strip() for line in pages if line.startswith("    jaxtrain submit ")]
    found += re.findall(r"`(jaxtrain submit [^`]+)`", (DOCS / "command_line.md").read_text())
    return sorted({line for line in found if "CONFIG" not in line})


@pytest.mark.parametrize("line", examples())
def test_examples_are_accepted(cli, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    words = [word for word in shlex.split(line)[1:] if word != "--run"]
    if "--setup" in words:
        pytest.skip("it names a file of the user's")
    assert cli(*words).code == 0
