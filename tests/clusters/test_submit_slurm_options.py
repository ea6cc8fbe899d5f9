"""`submit slurm --sbatch`: options that the script sets itself are refused by every name, and GPUs are counted."""

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.submit.slurm import SlurmJob
from jaxtrain.submit.slurm_cluster import Nodes, check_fits
from jaxtrain.submit.slurm_options import asks_for_gpus, check_options, gpus_of_gres


@pytest.fixture
def submit(cli, tmp_path, monkeypatch):
    """A function that runs `jaxtrain submit slurm quickstart` where there is no Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    return lambda *words: cli("submit", "slurm", "quickstart", "--cpus-per-task=1", *words)


ARRAY = (
    "all jobs of an array would train in one run directory; submit one job per run, each with a --run-dir of its own"
)
# option: what is said of it; abbreviations as Slurm 22.05 takes them
REFUSED = {
    "--array=0-3": ARRAY,
    "--arr=0-3": ARRAY,
    "-a0-3": ARRAY,
    "-Ha0-3": ARRAY,
    "--nodes=4": "the script sets --nodes itself; use --nodes instead",
    "-N4": "the script sets --nodes itself; use --nodes instead",
    "-WN4": "the script sets --nodes itself; use --nodes instead",
    "--ntasks=4": "the script sets --ntasks itself; use --nodes and --tasks-per-node instead",
    "--tasks=4": "the script sets --tasks-per-node itself; use --tasks-per-node instead",
    "--gpus-per-n=4": "the script sets --gpus-per-node itself; use --gpus-per-node instead",
    "--time=30": "the script sets --time itself; use --time instead",
    "--out=x": "the script sets --output itself; use --output instead",
    "--signal=USR1@60": "the script sets --signal itself; use --signal and --warning-seconds instead",
    "--chdir=/tmp": "the script sets --chdir itself; its restarts need it as it is; leave it out",
    "--no-r": "the script sets --no-requeue itself; its restarts need it as it is; leave it out",
    "--open-mode=truncate": "the script sets --open-mode itself; its restarts need it as it is; leave it out",
}


@pytest.mark.parametrize(("option", "said"), REFUSED.items(), ids=REFUSED)
def test_an_option_that_the_script_sets(option, said):
    with pytest.raises(ConfigError) as caught:
        check_options(["--exclusive", option])
    assert str(caught.value) == f"--sbatch {option}: {said}"


@pytest.mark.parametrize("option", ["--time=UNLIMITED", "-t0", "--requeue", "--open-mode=append"])
def test_what_the_script_writes_too_and_no_limit_are_taken(option):
    check_options([option])


def test_other_options_are_taken():
    names = "exclusive gpus=8 gpus-per-task=1 gres=gpu:8 mem-per-cpu=2G nodelist=a time-min=5 ntasks-per-core=1 error=x"
    check_options(
        [*(f"--{name}" for name in names.split()), "-xnode1", "-wa", "-dsingleton", "-G8", "-H", "--comment=-N"]
    )


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu", "1"),
        ("gpu:8", "8"),
        ("gpu:a100", "a100:1"),
        ("gpu:2080ti:4,nvme:1", "2080ti:4"),
        ("gpu:a:1,gpu:b:2", "3"),
        ("nvme:1", None),
    ],
)
def test_gpus_among_resources(text, gpus):
    options = ["--exclusive", f"--gres={text}"]
    assert gpus_of_gres(options) == gpus
    assert asks_for_gpus(options) == (gpus is not None)


# option: what is said of GPUs; None: nothing, since they are counted
GPUS = {
    "--exclusive": "without --gpus-per-node the job asks for no GPU",
    "--gres=nvme:1": "without --gpus-per-node the job asks for no GPU",
    "--gres=nvme:1,gpu:a100:8": None,
    "--gpus=16": "the GPUs that --sbatch asks for are not counted",
    "--tres-per-task=gres/gpu:8": "the GPUs that --sbatch asks for are not counted",
    "-sG16": "the GPUs that --sbatch asks for are not counted",
}


@pytest.mark.parametrize(("option", "line"), GPUS.items(), ids=GPUS)
def test_what_is_said_of_gpus(submit, option, line):
    answer = submit(f"--sbatch={option}")
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
        ("--emulate 1", "--emulate 1 trains on the CPU, and --sbatch=--gres asks for GPUs; leave out one"),
    ],
    ids=["degrees", "tasks", "emulated"],
)
def test_gpus_as_a_resource_are_compared(submit, options, line):
    answer = submit("--sbatch=--gres=gpu:8", *options.split())
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"jaxtrain: {line}"), answer.err


def test_gpus_asked_for_twice_are_refused(submit):
    answer = submit("--sbatch=--gres=gpu:8", "--gpus-per-node", "4")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == (
        "jaxtrain: --gpus-per-node 4 and --sbatch=--gres, for gpu:8, both ask for the GPUs of a node; leave out one\n"
    )


def test_gpus_as_a_resource_are_compared_with_the_nodes(tmp_path):
    job = SlurmJob(name="a", folder=tmp_path, output=tmp_path / "a", sbatch_options=["--gres=gpu:a100:8"])
    nodes = Nodes("main", True, 2, None, None, 64, {"a100": 4})
    with pytest.raises(ConfigError, match=r"^--sbatch=--gres a100:8: of the 2 nodes of partition main 0 have so many"):
        check_fits(job, [nodes])
