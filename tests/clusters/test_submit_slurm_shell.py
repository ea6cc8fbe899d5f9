"""The script of `jaxtrain submit slurm` beside what a user's shell, another job and sbatch's own reading do to it."""

import os
import re
import subprocess

import pytest


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A function that puts a program on PATH, which has nothing else of Slurm; the current folder is an empty one."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/nowhere")

    def put(name, text):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    return put


def test_a_setup_that_stops_at_errors_leaves_the_restart_to_the_script(cli, commands, tmp_path):
    text = cli("submit", "slurm", "quickstart", "--setup", "set -euo pipefail").out
    commands("srun", "exit 75")
    commands("scontrol", f'echo "$*" > {tmp_path}/asked')
    environment = {**os.environ, "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "a"}
    done = subprocess.run(["/bin/bash", "-c", text], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 75
    assert (tmp_path / "asked").read_text() == "requeue 17\n"


def test_a_job_that_a_job_submits_does_not_take_its_restarts_over(cli, commands, monkeypatch, tmp_path):
    commands("sbatch", f'IFS= read -r -d "" text; declare -x > {tmp_path}/environment; echo 23')
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_MEM_PER_CPU", "SLURM_CONF", "OTHER"):
        monkeypatch.setenv(name, "7")
    assert cli("submit", "slurm", "quickstart", "--run").out == "23\n"
    found = (tmp_path / "environment").read_text()
    assert [name for name in re.findall(r"declare -x (\w+)", found) if name.startswith(("SLURM", "OTHER"))] == [
        "OTHER",
        "SLURM_CONF",
    ]


def test_sbatch_reads_a_backslash_as_one(cli, commands):
    # Seen with sbatch 22.05: it takes one away inside of quotes too.
    text = cli("submit", "slurm", "quickstart", "--job-name", "a\\b").out
    assert "#SBATCH '--job-name=a\\\\b'\n" in text
    assert "/a-b-%j.out\n" in text


@pytest.mark.parametrize(
    ("options", "left"),
    [((), ["PARTITION", "TIMELIMIT"]), (("--partition", "big"), ["TIMELIMIT"]), (("--time", "1-0"), ["PARTITION"])],
    ids=["neither", "partition", "time"],
)
def test_options_that_were_typed_stand_above_variables_of_sbatch(cli, commands, monkeypatch, tmp_path, options, left):
    commands("sinfo", 'echo "big|infinite|1-infinite|8|(null)|b1"')
    commands("sbatch", f'IFS= read -r -d "" text; declare -x > {tmp_path}/environment; echo 23')
    for name, value in {"PARTITION": "big", "TIMELIMIT": "5", "NO_REQUEUE": "1", "OPEN_MODE": "truncate"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    assert cli("submit", "slurm", "quickstart", *options, "--run").out == "23\n"
    assert re.findall(r"declare -x SBATCH_(\w+)", (tmp_path / "environment").read_text()) == left
