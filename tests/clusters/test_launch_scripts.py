"""The scripts for TPU VMs, SkyPilot and Ray, with stand-ins for what they call; container files as texts."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
TPU_VM = ROOT / "scripts" / "tpu_vm.sh"
SKY = ROOT / "scripts" / "sky_train.yaml"
# Notes its arguments, and runs what a host would: with one host, --worker=all is one.
GCLOUD = """\
#!/bin/bash
printf '%s\\n' "$*" >>"$CALLS"
for word in "$@"; do case $word in --command=*) exec bash -c "${word#--command=}" ;; esac; done
"""
# Notes its arguments one per line, and ends with 75 at SIGTERM, as a run does.
JAXTRAIN = """\
#!/bin/bash
printf '%s\\n' "$JAX_PLATFORMS" "$@" >arguments
trap 'exit 75' TERM
touch ready
while :; do sleep 0.05; done
"""


@pytest.fixture
def host(tmp_path):
    """A host of a slice: its home, with jaxtrain installed and gcloud first on the path."""
    for name, text in (("bin/gcloud", GCLOUD), ("jaxtrain-env/bin/jaxtrain", JAXTRAIN)):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}

    def call(*words):
        return subprocess.run(
            [TPU_VM, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30
        )

    yield tmp_path, call
    if (tmp_path / "jaxtrain.pid").exists():
        with_pid = (tmp_path / "jaxtrain.pid").read_text()
        subprocess.run(["kill", "-KILL", with_pid.strip()], capture_output=True, check=False)


def wait_for(happened):
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(pid):
    """A process that has ended and that nobody has waited for yet is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_slice_trains_until_it_is_stopped(host):
    home, call = host
    words = ("llama3_8b", "parallel.fsdp=16", "name=it's a run", "--run-dir", "/mnt/$HOME")
    assert call("train", "slice", "us-east5-b", *words).returncode == 0
    wait_for((home / "ready").exists)
    # Every word arrives as it was, behind two shells.
    assert (home / "arguments").read_text().splitlines() == ["tpu,cpu", "train", *words]
    assert "compute tpus tpu-vm ssh slice --zone=us-east5-b --worker=all" in (home / "calls").read_text()
    again = call("train", "slice", "us-east5-b", *words)
    assert (again.returncode, again.stderr) == (1, "a run is going on here\n")
    pid = int((home / "jaxtrain.pid").read_text())
    assert call("stop", "slice", "us-east5-b").returncode == 0
    wait_for(lambda: not is_alive(pid))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck: apt-get install shellcheck")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", TPU_VM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_nodes_of_skypilot_are_one_run(tmp_path):
    rank = 1
    task = yaml.safe_load(SKY.read_text())
    program = tmp_path / "jaxtrain-env" / "bin" / "jaxtrain"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/bash\necho $JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID "$@"\n')
    program.chmod(0o755)
    environment = {
        **{"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
        **{"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_RANK": str(rank)},
        **{**task["envs"], "SETTINGS": "parallel.fsdp=16 train.steps=5"},
    }
    done = subprocess.run(["bash", "-euc", task["run"]], env=environment, capture_output=True, text=True, timeout=30)
    words = "train llama3_8b parallel.fsdp=16 train.steps=5 --run-dir /runs/llama3_8b"
    assert done.stdout == f"10.0.0.1:55527 2 {rank} {words}\n", done.stderr


@pytest.fixture
def ray_train(monkeypatch):
    """The script, with stand-ins for Ray and for the command line of jaxtrain."""
    ray = types.ModuleType("ray")
    ray.train = types.ModuleType("ray.train")
    ray.train.get_context = lambda: types.SimpleNamespace(get_world_rank=lambda: 0)
    ray.get = lambda value: value
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.train", ray.train)
    spec = importlib.util.spec_from_file_location("ray_train", ROOT / "scripts" / "ray_train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("code", "started_again"),
    [(0, False), (2, False), (5, False), (1, True), (70, True), (75, True)],
    ids=str,
)
def test_ray_starts_again_what_may_go_on(ray_train, monkeypatch, code, started_again):
    told = []
    ended = types.SimpleNamespace(tell=types.SimpleNamespace(remote=told.append))
    monkeypatch.setattr("jaxtrain.cli.main", lambda words: code)
    settings = {"words": ["train"], "ended": ended}
    if started_again:
        with pytest.raises(RuntimeError, match=f"exit code {code}"):
            ray_train.train_in_worker(settings)
    else:
        ray_train.train_in_worker(settings)
    assert told == [code]


FILES = sorted((ROOT / "containers").glob("Dockerfile.*"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_container_file(path):
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    found = dict(line.split(" ", 1) for line in text.splitlines() if line.strip() and not line.startswith("#"))
    # A tag that stays what it is: a version, not `latest`.
    assert re.fullmatch(r"[a-z0-9./-]+:\d+\.\d+[\w.-]*", found["FROM"].split(" ")[0])
    extras = set(found["ARG"].removeprefix("EXTRAS=").split(","))
    # Pods of several hosts find each other with k8s.
    assert "k8s" in extras <= set(EXTRAS)
    assert '-c /source/containers/constraints.txt "/source[${EXTRAS}]"' in text
    assert (found["USER"], found["ENTRYPOINT"], found["CMD"]) == ("1000:1000", '["jaxtrain"]', '["--help"]')


def test_versions_are_pinned_to_what_pyproject_allows():
    lines = (ROOT / "containers" / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    from packaging.requirements import Requirement

    for text in [*settings["dependencies"], *EXTRAS["k8s"], *EXTRAS["data"]]:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"python_version": "3.11"}):
            assert wanted.specifier.contains(pins[wanted.name.lower()]), text
