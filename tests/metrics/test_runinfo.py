"""run.json: strict, written whole, with versions and the git commit and without the environment."""

import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.schema import Config
from jaxtrain.metrics.runinfo import finished_info, git_state, package_versions, run_info, write_json_atomic
from jaxtrain.runtime import files


def test_run_info_is_strict_json_without_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-user")
    monkeypatch.chdir(tmp_path)
    info = run_info(
        Config(),
        name="r",
        mesh_shape={"data": 1, "fsdp": 1},
        model={"name": "transformer", "num_parameters": np.int64(5)},
        data={"description": ["text"], "fingerprint": "abc"},
    )
    text = json.dumps(info, allow_nan=False)
    assert "secret-of-the-user" not in text
    assert info["config"]["train"]["steps"] == Config().train.steps
    assert info["model"] == {"name": "transformer", "num_parameters": 5}
    assert info["devices"]["platform"] == "cpu"
    assert info["versions"]["jax"]
    assert info["git_commit"] is None
    assert (info["status"], info["finished"]) == ("running", None)
    done = finished_info(info, status="done", final={"loss": math.nan, "eval_loss": 1.5})
    assert (done["status"], done["final"]) == ("done", {"loss": None, "eval_loss": 1.5})
    assert done["finished"] >= info["created"]


def test_missing_package_has_no_version():
    assert package_versions(["no-such-package"])["no-such-package"] is None


def _git(directory, *arguments):
    subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(directory), *arguments],
        check=True,
        capture_output=True,
    )


def test_git_state_of_a_folder_that_was_deleted(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert git_state(Path()) == (None, None)


def test_git_state(tmp_path):
    assert git_state(tmp_path) == (None, None)
    _git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == (None, None)
    (tmp_path / "file").write_text("one")
    _git(tmp_path, "add", "file")
    _git(tmp_path, "commit", "-q", "-m", "m")
    commit, dirty = git_state(tmp_path)
    assert (len(commit or ""), dirty) == (40, False)
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path) == (commit, True)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ({"a": math.nan, "b": [math.inf, 1]}, {"a": None, "b": [None, 1]}),
        ({1: (np.float32(0.5), None, True)}, {"1": [0.5, None, True]}),
        ({"s": {"b", "a"}, "o": object}, {"s": ["a", "b"], "o": str(object)}),
    ],
)
def test_json_is_strict(tmp_path, value, written):
    path = tmp_path / "run.json"
    write_json_atomic(path, value)
    assert json.loads(path.read_text()) == written


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_json_atomic(path, {"a": 1})

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json_atomic(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
