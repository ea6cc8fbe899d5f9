"""The container files, read without a builder: what they start from, what they install, and whom they run as."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = sorted((ROOT / "containers").glob("Dockerfile.*"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def instructions(path):
    """(instruction, argument) of each line, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


def test_every_kind_of_device_has_a_file():
    assert [path.suffix for path in FILES] == [".cpu", ".cuda", ".tpu"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_container_file(path):
    found = instructions(path)
    known = {"FROM", "ARG", "COPY", "RUN", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in found} <= known
    images = [argument.split(" ")[0] for name, argument in found if name == "FROM"]
    # A tag that stays what it is: a version, not `latest`.
    assert all(re.fullmatch(r"[a-z0-9./-]+:\d+\.\d+[\w.-]*", image) for image in images)
    (extras,) = (argument for name, argument in found if name == "ARG")
    assert set(extras.removeprefix("EXTRAS=").split(",")) <= set(EXTRAS)
    # Pods of several hosts find each other with it.
    assert "k8s" in extras
    (install,) = (argument for name, argument in found if "pip install" in argument)
    assert '-c /source/containers/constraints.txt "/source[${EXTRAS}]"' in install
    (user,) = (argument for name, argument in found if name == "USER")
    assert user == "1000:1000"
    assert found[-2:] == [("ENTRYPOINT", '["jaxtrain"]'), ("CMD", '["--help"]')]
    assert not re.search(r"(?i)(token|password|secret|api_?key)\s*=", path.read_text())


def test_versions_are_pinned_to_what_pyproject_allows():
    lines = (ROOT / "containers" / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    from packaging.requirements import Requirement

    for text in [*settings["dependencies"], *EXTRAS["k8s"], *EXTRAS["data"]]:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"python_version": "3.11"}):
            assert wanted.specifier.contains(pins[wanted.name.lower()]), text


def test_an_image_holds_the_package_and_nothing_else():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert {"pyproject.toml", "README.md", "jaxtrain", "configs", "containers/constraints.txt"} <= set(kept)
    assert not any(part in kept for part in (".git", "runs", "tests"))
