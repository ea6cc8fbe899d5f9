"""`jaxtrain doctor`: facts, measured numbers, and a line that mends each problem."""

import json
from pathlib import Path

import pytest

from jaxtrain.commands.doctor import version_problems

GOOD = {"jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8"}
# id: (versions, what the problems say)
VERSIONS = {
    "oldest pair": (GOOD, []),
    "newest pair": (GOOD | {"jax": "0.12.0", "flax": "0.12.12"}, []),
    "last jax for old flax": (GOOD | {"jax": "0.11.0"}, []),
    "old flax on new jax": (GOOD | {"jax": "0.11.1"}, ["flax 0.12.8 does not work with jax 0.11.1"]),
    "also its successor": (GOOD | {"jax": "0.12.0.1", "flax": "0.12.9"}, ["flax 0.12.9 does not work with jax"]),
    "first that was mended": (GOOD | {"jax": "0.11.1", "flax": "0.12.10"}, []),
    "old jax": (GOOD | {"jax": "0.9.3"}, ["jax 0.9.3 is older than 0.10.2"]),
    "missing package": (GOOD | {"optax": None}, ["optax is not installed"]),
}


@pytest.mark.parametrize(("versions", "expected"), VERSIONS.values(), ids=VERSIONS.keys())
def test_version_problems(versions, expected):
    problems = version_problems(versions)
    assert len(problems) == len(expected)
    for problem, start in zip(problems, expected, strict=True):
        assert problem.what.startswith(start)
        assert problem.fatal
        assert "pip install" in problem.mend


def test_reports_what_is_here(cli):
    answer = cli("doctor", "--json")
    assert (answer.code, answer.err) == (0, "")
    found = json.loads(answer.out)
    assert found["devices"]["count"] == 8
    assert found["collective_works"] is True
    assert set(found["matmul_gflops_per_second"]) == {"float32", "bfloat16"}
    assert min(found["matmul_gflops_per_second"].values()) > 0
    assert found["versions"].keys() >= {
        "python",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax-checkpoint",
        "grain",
        "numpy",
    }
    assert found["disk_free_bytes"] > 0
    assert all(not problem["fatal"] for problem in found["problems"])


def test_each_problem_comes_with_what_mends_it(cli, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXTRAIN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(
        "jaxtrain.runtime.accelerators.unused_accelerator", lambda platform: "there is a card: pip install x"
    )
    answer = cli("doctor")
    assert answer.code == 0
    lines = [line for line in answer.out.splitlines() if line.startswith("problem: ")]
    assert lines[0] == "problem: there is a card; pip install x"
    assert "cannot be written; export JAXTRAIN_CACHE_DIR=FOLDER" in lines[1]


def test_a_broken_pair_cannot_work(cli, monkeypatch):
    monkeypatch.setattr(
        "jaxtrain.commands.doctor.package_versions",
        lambda names: {name: "0.12.9" if name == "flax" else "0.12.0" for name in names},
    )
    answer = cli("doctor")
    assert answer.code == 2
    assert "problem: flax 0.12.9 does not work with jax 0.12.0" in answer.out
    assert "pip install -U 'flax>=0.12.10'" in answer.out
    assert "matmul" not in answer.out


def test_cache_size_counts_files(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXTRAIN_CACHE_DIR", str(tmp_path))
    Path(tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "program").write_bytes(b"x" * 100)
    found = json.loads(cli("doctor", "--json").out)["compilation_cache"]
    assert found == {"folder": str(tmp_path / "compiled"), "bytes": 100, "writable": True}
