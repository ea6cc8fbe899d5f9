"""The scripts for TPU VMs and SkyPilot can be parsed; container files name versions that pyproject allows."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
TPU_VM = ROOT / "scripts" / "tpu_vm.sh"
SKY = ROOT / "scripts" / "sky_train.yaml"


def test_scripts_are_parsed():
    sky = yaml.safe_load(SKY.read_text())
    for command in ([str(TPU_VM)], ["-c", sky["setup"]], ["-c", sky["run"]]):
        done = subprocess.run(["bash", "-n", *command], capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, ""), command


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
