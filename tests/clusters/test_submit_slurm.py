"""The batch script of `jaxtrain submit slurm`: what it asks for, what it does at each exit code, and every mistake.

Slurm's commands are programs of the test; `test_slurm.py` has a real Slurm.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.submit.interval import measured_save_seconds, save_every_minutes
from jaxtrain.submit.slurm_options import asks_for_gpus, check_options, gpus_of_gres
from jaxtrain.submit.slurm_times import parse_time

DOCS = Path(__file__).parents[2] / "docs"

# As `sinfo --Node` prints: partition, limit, size of jobs, cores, resources, node; `big` has two kinds of nodes.
SINFO = """main*|1-00:00:00|1-infinite|64|gpu:a100:8(S:0-1)|a1
main*|1-00:00:00|1-infinite|64|gpu:a100:8(S:0-1)|a2
big|infinite|1-2|64|gpu:a100:8|a1
big|infinite|1-2|64|gpu:a100:8|a2
big|infinite|1-2|128|gpu:h100:4,gpu:h200:4|h1
cpu|30:00|1-infinite|8|(null)|c1
old|infinite|1-infinite|32|gpu:2080ti:8(S:0,1),nvme:1|o1
old|infinite|1-infinite|32|gpu:3090:4|o2
"""


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


@pytest.fixture
def sinfo(commands, tmp_path):
    (tmp_path / "sinfo.txt").write_text(SINFO)
    commands("sinfo", f'while IFS= read -r line; do echo "$line"; done < {tmp_path / "sinfo.txt"}')


# id: (options, the line that it gives); the first lines are about the cluster of `sinfo`
WRONG = {
    "partition": (
        "--partition gpu",
        "--partition gpu: this cluster has no such partition; sinfo lists big, cpu, main, old",
    ),
    "nodes": ("--nodes 3", "--nodes 3: partition main has 2 nodes; ask for fewer, or another --partition"),
    "nodes of a job": ("--nodes 3 --partition big", "--nodes 3: a job of partition big gets at most 2; ask for fewer"),
    "time of the partition": (
        "--time 2-0",
        "--time 2-0: partition main ends jobs after 1-00:00:00; ask for at most that: the job ",
    ),
    "GPUs": (
        "--gpus-per-node 16",
        "--gpus-per-node 16: of the 2 nodes of partition main 0 have so many (the most is 8); ask for "
        "fewer, or another --partition",
    ),
    "cores": (
        "--cpus-per-task 16 --tasks-per-node 8",
        "8 x 16 CPU cores (--tasks-per-node, --cpus-per-task): of the 2 nodes of partition main 0 can give so many "
        "(the most is 64); ask for fewer",
    ),
    "time": (
        "--time 1h",
        "--time '1h' is not a time; write minutes (90), hours:minutes:seconds (12:00:00), days-hours (2-0) or "
        "days-hours:minutes (2-12:30)",
    ),
    "time for nothing but the warning": (
        "--time 2",
        "--time 2 is 120 s, and the processes are told to save 120 s before it ends (--warning-seconds); ask for ",
    ),
    "warning": ("--warning-seconds 5", "--warning-seconds 5 is too short for a save; use 30 or more"),
    "GPUs for emulated devices": (
        "--gpus-per-node 8 --emulate 2",
        "--emulate 2 trains on the CPU, and --gpus-per-node",
    ),
    "processes that do not divide the GPUs": (
        "--gpus-per-node 8 --tasks-per-node 3",
        "--tasks-per-node 3 does not divide the 8 GPUs of a node; use one of 1, 2, 4, 8",
    ),
    "a code after which no start goes on": (
        "--restart-at 2,75",
        "--restart-at 2: no start goes on after it; use codes",
    ),
    "an array": (
        "--sbatch=--array=0-3",
        "--sbatch --array=0-3: all jobs of an array would train in one run directory; submit one job per run, each",
    ),
    "output": (
        "--output logs/%j.out",
        "--output {work}/logs/%j.out: there is no folder {work}/logs, and Slurm makes none",
    ),
    "no sbatch": ("--run", "no sbatch on PATH, so nothing was submitted; run this where Slurm's commands are"),
    "secret": (
        "data.call=my:rows data.args.api_key=abc",
        "data.args.api_key holds a secret, which the script would show; put it into the environment",
    ),
    "degrees": (
        "--nodes 2 --gpus-per-node 8 parallel.fsdp=3",
        "parallel: fsdp=3 makes 3, which does not divide the number of devices (16); use 2 or 4",
    ),
    "interval without a measure": (
        "--mtbf-hours 24",
        "--mtbf-hours needs what a save costs, and runs/quickstart holds no run with two saves or more; ",
    ),
}


@pytest.mark.parametrize(("options", "line"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_one_line_and_leaves_nothing(cli, sinfo, tmp_path, options, line):
    words = [word for word in options.split(" ") if word]
    quiet = [] if "--cpus-per-task" in options else ["--cpus-per-task=1"]
    quiet += [] if "--gpus-per-node" in options else ["--emulate=1"]
    answer = cli("submit", "slurm", "quickstart", "train.global_batch_size=48", *words, *quiet)
    last = answer.err.splitlines()[-1]
    assert (answer.code, answer.out) == (2, "")
    assert re.sub(r"^jaxtrain( submit slurm)?: ", "", last).startswith(line.format(work=tmp_path / "work")), last
    assert len(answer.err.splitlines()) == 1 + ("Young" in answer.err)
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("12:00:00", 43200), ("2-0", 172800), ("2-12:30", 217800)],
)
def test_times_as_slurm_reads_them(text, seconds):
    assert parse_time(text, option="--time") == seconds


@pytest.mark.parametrize(
    "options",
    [
        "--nodes 2 --gpus-per-node a100:8",
        "--gpus-per-node 2080ti:8 --partition old",
        "--partition cpu --time 30",
    ],
)
def test_what_the_cluster_can_run(cli, sinfo, options):
    assert cli("submit", "slurm", "quickstart", "train.global_batch_size=48", *options.split()).code == 0


SINFOS = {
    "no controller": (
        "echo 'slurm_load_partitions: Unable to contact' >&2; exit 1",
        "sinfo: slurm_load_partitions: Unable",
    ),
}


@pytest.mark.parametrize(("program", "reason"), SINFOS.values(), ids=SINFOS)
def test_without_a_cluster_the_script_is_printed_all_the_same(cli, commands, program, reason):
    if program is not None:
        commands("sinfo", program)
    answer = cli("submit", "slurm", "quickstart", "--partition", "any", "--gpus-per-node", "8", "--cpus-per-task", "16")
    assert answer.code == 0
    assert answer.err.startswith(f"jaxtrain: not compared with a cluster: {reason}")
    assert answer.err.count("\n") == 1
    assert "#SBATCH --partition=any\n" in answer.out


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
    assert "\nmost_restarts=7\n" in text
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
    "a process was lost": (70, 1, True, 70, True),
    "saved, and the last restart is used": (75, 2, True, 1, False),
    "Slurm does not requeue": (75, 0, False, 75, True),
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


def test_a_setup_that_fails_ends_the_job(cli, commands):
    text = cli("submit", "slurm", "quickstart", "--setup", "false", "--setup", "echo not reached").out
    done = subprocess.run(["/bin/bash", "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "jaxtrain: --setup failed" in done.stderr
    assert "not reached" not in done.stdout


def test_run_hands_the_script_to_sbatch(cli, sinfo, commands, tmp_path):
    commands(
        "sbatch", f'IFS= read -r -d "" text; printf "%s" "$text" > {tmp_path}/got; echo "$*" >&2; echo "23;cluster"'
    )
    answer = cli("submit", "slurm", "quickstart", "--gpus-per-node", "8", "--cpus-per-task", "2", "-o", "a", "--run")
    assert (answer.code, answer.out) == (0, "23\n")
    work = tmp_path / "work"
    assert answer.err.splitlines()[-1] == (
        f"jaxtrain: submitted; output: {work}/quickstart-23.out; run directory: {work}/runs/quickstart"
    )
    assert (tmp_path / "got").read_text() == (work / "a").read_text()
    commands("sbatch", "echo 'sbatch: error: invalid account' >&2; echo 'sbatch: error: Batch job: no' >&2; exit 1")
    answer = cli("submit", "slurm", "quickstart", "--gpus-per-node", "8", "--cpus-per-task", "2", "--run")
    assert (answer.code, answer.out, answer.err) == (2, "", "jaxtrain: Slurm refused the job: Batch job: no\n")


def test_paths_are_absolute_and_a_percent_sign_is_one(cli, commands, tmp_path, monkeypatch):
    folder = tmp_path / "100 %j"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "my.yaml").write_text("train: {steps: 5}\n")
    text = cli("submit", "slurm", "my.yaml").out
    options = [shlex.split(line)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    # sbatch reads patterns in the name of the output alone.
    assert f"--chdir={folder}" in options
    assert f"--output={tmp_path}/100 %%j/my-%j.out" in options
    assert shlex.join(["train", f"{folder}/my.yaml", "--run-dir", f"{folder}/runs/my"]) in text


def test_the_interval_is_youngs():
    # sqrt(2 x 30 s x 24 h) = 2277 s, and the figure is rounded to a tenth of a minute.
    assert save_every_minutes(save_seconds=30, mtbf_hours=24) == round(math.sqrt(2 * 30 * 24 * 3600) / 60, 1) == 37.9


def test_the_interval_from_what_a_run_measured(cli, commands, tmp_path):
    run = tmp_path / "work" / "runs" / "quickstart"
    run.mkdir(parents=True)
    saves = [
        {"step": step, "seconds": {"saving": spent}, "at": 0.0} for step, spent in ((0, 0.0), (10, 3.0), (20, 5.0))
    ]
    (run / "run.json").write_text(json.dumps({"config": {}, "saves": saves}))
    assert measured_save_seconds(run) == 2.5
    answer = cli("submit", "slurm", "quickstart", "--mtbf-hours", "24")
    # sqrt(2 x 2.5 s x 24 h) = 657 s.
    assert " checkpoint.every_minutes=11 " in answer.out
    assert "from 2.5 s per save (measured in runs/quickstart) and 24 h between failures" in answer.err


@pytest.mark.parametrize("saves", [None, [{"seconds": {"saving": 1.0}}]], ids=str)
def test_a_run_without_two_saves_measures_nothing(tmp_path, saves):
    (tmp_path / "run.json").write_text(json.dumps({"config": {}, "saves": saves}))
    assert measured_save_seconds(tmp_path) is None


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


# Options of sbatch that the script sets itself, by every name: what is said; abbreviations as Slurm 22.05 takes them.
REFUSED = {
    "--arr=0-3": "all jobs of an array would train in one run directory; submit one job per run, each with a --run-dir",
    "-N4": "the script sets --nodes itself; use --nodes instead",
    "-WN4": "the script sets --nodes itself; use --nodes instead",
    "--gpus-per-n=4": "the script sets --gpus-per-node itself; use --gpus-per-node instead",
    "--signal=USR1@60": "the script sets --signal itself; use --signal and --warning-seconds instead",
    "--no-r": "the script sets --no-requeue itself; its restarts need it as it is; leave it out",
}


@pytest.mark.parametrize(("option", "said"), REFUSED.items(), ids=REFUSED)
def test_an_option_that_the_script_sets(option, said):
    with pytest.raises(ConfigError) as caught:
        check_options(["--exclusive", option])
    assert str(caught.value).startswith(f"--sbatch {option}: {said}")


def test_other_options_are_taken():
    names = "exclusive gpus=8 gres=gpu:8 mem-per-cpu=2G nodelist=a time-min=5 ntasks-per-core=1 error=x time=UNLIMITED"
    check_options([*(f"--{name}" for name in names.split()), "-xnode1", "-dsingleton", "-G8", "-t0", "--comment=-N"])


@pytest.mark.parametrize(
    ("text", "gpus"), [("gpu", "1"), ("gpu:a100", "a100:1"), ("gpu:2080ti:4,nvme:1", "2080ti:4"), ("nvme:1", None)]
)
def test_gpus_among_resources(text, gpus):
    options = ["--exclusive", f"--gres={text}"]
    assert gpus_of_gres(options) == gpus
    assert asks_for_gpus(options) == (gpus is not None)


# option: what is said of GPUs; None: nothing, since they are counted
GPUS = {
    "--exclusive": "without --gpus-per-node the job asks for no GPU",
    "--gres=nvme:1,gpu:a100:8": None,
    "-sG16": "the GPUs that --sbatch asks for are not counted",
}


@pytest.mark.parametrize(("option", "line"), GPUS.items(), ids=GPUS)
def test_what_is_said_of_gpus(cli, commands, option, line):
    answer = cli("submit", "slurm", "quickstart", "--cpus-per-task=1", f"--sbatch={option}")
    assert answer.code == 0
    said = [one for one in answer.err.splitlines() if "not compared with a cluster" not in one]
    assert len(said) == (line is not None)
    assert all(one.startswith(f"jaxtrain: {line}") for one in said)
    assert f"#SBATCH {option}\n" in answer.out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("parallel.fsdp=3 --nodes 2", "parallel: fsdp=3 makes 3, which does not divide the number of devices (16)"),
        ("--tasks-per-node 3", "--tasks-per-node 3 does not divide the 8 GPUs of a node"),
        ("--gpus-per-node 4", "--gpus-per-node 4 and --sbatch=--gres, for gpu:8, both ask for the GPUs of a node"),
    ],
    ids=["degrees", "tasks", "twice"],
)
def test_gpus_as_a_resource_are_compared(cli, commands, options, line):
    answer = cli("submit", "slurm", "quickstart", "--cpus-per-task=1", "--sbatch=--gres=gpu:8", *options.split())
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"jaxtrain: {line}"), answer.err


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
    assert answer.err.endswith("; use 16\n")
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
