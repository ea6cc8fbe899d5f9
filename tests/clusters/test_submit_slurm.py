"""The batch script of `jaxtrain submit slurm`: what it asks for, what it does at each exit code, and every mistake.

Slurm's commands are programs of the test; `test_slurm.py` has a real Slurm.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A function that puts a program on PATH, which has nothing else of Slurm; the current folder is an empty one."""
    folder, work = tmp_path / "bin", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", f"{folder}:/nowhere")

    def put(name, text):
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)

    return put


# Options: the line that they give.
WRONG = {
    "--gpus-per-node eight": "--gpus-per-node eight is not a number of GPUs; write 8",
    "--gpus-per-node 8 --tasks-per-node 3": "--tasks-per-node 3 does not divide the 8 GPUs of a node",
    "--run": "no sbatch on PATH, so nothing was submitted; use -o FILE",
    "data.call=my:rows data.args.api_key=abc": "data.args.api_key holds a secret, which would be shown",
}


@pytest.mark.parametrize(("options", "line"), WRONG.items(), ids=WRONG)
def test_a_mistake_is_one_line_and_leaves_nothing(cli, commands, tmp_path, options, line):
    answer = cli("submit", "slurm", "quickstart", "train.global_batch_size=48", *options.split(" "))
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"jaxtrain: {line.format(work=tmp_path / 'work')}")
    assert answer.err.count("\n") == 1
    assert list((tmp_path / "work").iterdir()) == []


EVERYTHING = (
    "train.global_batch_size=32 "
    "--nodes 4 --gpus-per-node a100:8 --tasks-per-node 2 --cpus-per-task 12 --mem 0 --time 2-0 --partition a,b "
    "--account lab --qos high --constraint a100|h100 --job-name big --signal USR2 --warning-seconds 300 "
    "--max-restarts 7 --restart-at 75,137 --sbatch=--exclusive "
    "--srun=--mpi=none --setup module\tload\tcuda --output x-%j.log --run-dir r"
)


def test_the_whole_script(cli, commands, tmp_path):
    answer = cli("submit", "slurm", "quickstart", *EVERYTHING.split(" "), "-o", "job.sbatch")
    assert (answer.code, answer.out) == (0, "")
    text = (tmp_path / "work" / "job.sbatch").read_text()
    work = tmp_path / "work"
    options = [shlex.split(line)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert options == [
        *("--job-name=big", "--partition=a,b", "--account=lab", "--qos=high", "--constraint=a100|h100", "--nodes=4"),
        *("--ntasks-per-node=2", "--gpus-per-node=a100:8", "--cpus-per-task=12", "--mem=0", "--time=2-0"),
        *(f"--chdir={work}", f"--output={work}/x-%j.log", "--exclusive", "--signal=USR2@300", "--requeue"),
        "--open-mode=append",
    ]
    # All of them before the first command, after which sbatch reads none.
    assert max(at for at, line in enumerate(text.splitlines()) if line.startswith("#SBATCH")) < text.splitlines().index(
        "restarts=${SLURM_RESTART_COUNT:-0}"
    )
    assert "\nmax_restarts=7\n" in text
    assert "\n  75 | 137)\n" in text
    assert "\nmodule\tload\tcuda\n" in text
    srun = "srun --kill-on-bad-exit=0 --wait=60 --label --cpus-per-task=12 --mpi=none \\\n"
    assert f"{srun}  jaxtrain train quickstart train.global_batch_size=32 --run-dir {work}/r\n" in text


# A path, an override and a setup line that a shell, or a comment, would take apart.
HARD = ["train.steps=5", 'data.path=it\'s "a" $HOME `id` \\ %j #x', "name=a b"]
# Exit code of srun, restarts before, whether scontrol works -> exit code of the script, whether it asked for a restart.
ENDS = {
    "done": (0, 0, True, 0, False),
    "saved": (75, 0, True, 75, True),
    "saved, and the last restart is used": (75, 2, True, 1, False),
    "started by Slurm itself too often": (None, 3, True, 1, False),
}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A script of a job with hard words, made where no Slurm is, and the folder that it begins in."""
    folder = tmp_path_factory.mktemp("hard") / "it's $a folder"
    folder.mkdir()
    words = ["submit", "slurm", "quickstart", *HARD, "--max-restarts", "2", "--setup", 'export X="1 2" # a comment']
    done = subprocess.run(
        [sys.executable, "-m", "jaxtrain", *words, "--nodes", "2", "--run-dir", "r u n"],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
        env={**os.environ, "PATH": "/nowhere", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


@pytest.mark.parametrize(("code", "restarts", "works", "ends", "asked"), ENDS.values(), ids=ENDS)
def test_what_the_script_does_at_an_exit_code(script, commands, tmp_path, code, restarts, works, ends, asked):
    text, folder = script
    commands("srun", f'printf "%s\\n" "$@" > {tmp_path}/words; echo "$X" >> {tmp_path}/words; exit {code}')
    commands("scontrol", f'echo "$*" > {tmp_path}/asked; {"exit 0" if works else "exit 1"}')
    environment = {**os.environ, "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "a,b"}
    if restarts:
        environment["SLURM_RESTART_COUNT"] = str(restarts)
    done = subprocess.run(["/bin/bash", "-c", text], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == ends, done.stderr
    assert done.stdout == f"jaxtrain: job 17 on a,b, restart {restarts} of at most 2\n"
    assert (tmp_path / "asked").exists() == asked
    if asked:
        assert (tmp_path / "asked").read_text() == "requeue 17\n"
    assert len(done.stderr.splitlines()) == (not works or ends == 1)
    assert "submit" in done.stderr or not done.stderr
    if code is not None:
        found = (tmp_path / "words").read_text().splitlines()
        assert found[found.index("jaxtrain") :] == [
            "jaxtrain",
            "train",
            "quickstart",
            *HARD,
            "--run-dir",
            f"{folder}/r u n",
            "1 2",
        ]


def test_run_hands_the_script_to_sbatch(cli, commands, monkeypatch, tmp_path):
    """Typed options stand above variables of sbatch; a job inside a job does not take over its number of restarts."""
    commands("sbatch", f'IFS= read -r -d "" text; printf "%s" "$text" > {tmp_path}/got; echo "$*" > {tmp_path}/words; '
             f'declare -x > {tmp_path}/environment; echo "23;cluster"')  # fmt: skip
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_MEM_PER_CPU", "SLURM_CONF", "OTHER"):
        monkeypatch.setenv(name, "7")
    answer = cli("submit", "slurm", "quickstart", "--gpus-per-node", "8", "--partition", "big", "-o", "a", "--run")
    work = tmp_path / "work"
    assert (answer.code, answer.out) == (0, "23\n")
    assert answer.err.splitlines() == [
        "wrote a",
        f"jaxtrain: submitted; output: {work}/quickstart-23.out; run directory: {work}/runs/quickstart",
    ]
    assert (tmp_path / "got").read_text() == (work / "a").read_text()
    assert (tmp_path / "words").read_text().startswith("--parsable --job-name=quickstart --partition=big --nodes=1 ")
    found = re.findall(r"declare -x (SLURM\w+|OTHER)", (tmp_path / "environment").read_text())
    assert found == ["OTHER", "SLURM_CONF"]
    commands("sbatch", "echo 'sbatch: error: invalid account' >&2; echo 'sbatch: error: Batch job: no' >&2; exit 1")
    answer = cli("submit", "slurm", "quickstart", "--gpus-per-node", "8", "--run")
    assert (answer.code, answer.out, answer.err) == (2, "", "jaxtrain: Slurm refused the job: Batch job: no\n")


POD = ("--image", "example.com/jaxtrain:0.1.0", "--volume", "runs:/runs")
BATCHES = {
    "slurm": ("slurm", "--nodes", "2", "--gpus-per-node", "8"),
    "job, accumulation": ("job", *POD, "--hosts", "2", "--gpus", "4", "train.accumulation_steps=2"),
    "jobset": ("jobset", *POD, "--tpu", "v5e/4x4"),
}


@pytest.mark.parametrize("words", BATCHES.values(), ids=BATCHES)
def test_a_batch_that_the_devices_do_not_divide_is_refused(cli, commands, words):
    kind, *rest = words
    answer = cli("submit", kind, "quickstart", *rest)
    assert (answer.code, answer.out) == (2, "")
    assert "train.global_batch_size=8 does not divide by data x fsdp x accumulation_steps = " in answer.err
    assert re.search(r"; use (accumulation_steps=1, or a batch of )?16\n$", answer.err)
    assert cli("submit", kind, "quickstart", *rest, "train.global_batch_size=16").code == 0


def examples():
    """Every line of the pages and of the command line's help that submits something."""
    pages = [line for name in ("slurm.md", "kubernetes.md") for line in (DOCS / name).read_text().splitlines()]
    found = [line.strip() for line in pages if line.startswith("    jaxtrain submit ")]
    found += re.findall(r"`(jaxtrain submit [^`]+)`", (DOCS / "command_line.md").read_text())
    return sorted({line for line in found if "CONFIG" not in line})


@pytest.mark.parametrize("line", examples())
def test_examples_of_the_pages_are_accepted(cli, commands, line):
    words = [word for word in shlex.split(line)[1:] if word != "--run"]
    if "--setup" in words:
        pytest.skip("it names a file of the user's")
    assert cli(*words).code == 0
