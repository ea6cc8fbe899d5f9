"""run.json: strict, written whole, with versions and the git commit; rates from host times in rows of metrics."""

import json
import math
import subprocess

import numpy as np
import pytest

from jaxtrain.config.schema import Config
from jaxtrain.metrics.runinfo import finished_info, git_state, run_info
from jaxtrain.metrics.throughput import Meter
from jaxtrain.runtime import files
from jaxtrain.runtime.files import write_json_atomic


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


def _git(directory, *arguments):
    subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(directory), *arguments],
        check=True,
        capture_output=True,
    )


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


def _row(meter, step):
    return meter.row(step, grad_norm=2.0, learning_rate=0.1, skipped_steps=0, device_memory_bytes=None)


def test_rates_are_of_the_window_and_counts_of_the_run():
    meter = Meter("tokens", 100, flops_per_step=50.0, peak_flops=200.0)
    for seconds, wait in ((0.5, 0.1), (0.5, 0.0), (3.0, 0.2)):
        meter.record(seconds, wait, {"loss": 1.0})
    row = _row(meter, 13)
    rates = {"tokens_per_second": 300 / 4.0, "step_seconds": 0.5, "data_wait_seconds": 0.1}
    rates["model_flops_utilization"] = 3 * 50 / 4.0 / 200
    counts = {"step": 13, "loss": 1.0, "grad_norm": 2.0, "learning_rate": 0.1, "tokens": 1300}
    assert list(row) == [*counts, *rates, "device_memory_bytes", "skipped_steps"]
    assert row == pytest.approx({**counts, **rates, "device_memory_bytes": None, "skipped_steps": 0})
    # A row starts a new window: the slow step is gone.
    meter.record(0.25, 0.0, {"loss": 1.0})
    assert _row(meter, 14)["tokens_per_second"] == pytest.approx(400)


def test_a_row_has_the_means_of_the_finite_values_of_its_window():
    meter = Meter("tokens", 1)
    for loss, share in ((2.0, 0.25), (math.nan, 0.5), (3.0, math.nan), (math.inf, 0.75)):
        meter.record(1.0, 0.0, {"loss": loss, "share": share})
    row = _row(meter, 4)
    assert (row["loss"], row["share"]) == (2.5, 0.5)
    meter.record(1.0, 0.0, {"loss": 0.1 + 0.2, "share": math.nan})
    row = _row(meter, 5)
    assert row["loss"] == 0.1 + 0.2, "a row of one step has its digits"
    assert math.isnan(row["share"])


def test_a_file_that_cannot_be_written_is_named_and_no_other(tmp_path):
    with pytest.raises(OSError, match=r"report\.html") as caught:
        write_json_atomic(tmp_path / "gone" / "report.html", {})
    assert caught.value.filename == str(tmp_path / "gone" / "report.html")
