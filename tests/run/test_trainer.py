"""A run as a whole: what it writes, what it evaluates and keeps, how it ends, and every mistake by its exit code."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest
from training_runs import TINY, rows, write_config

import jaxtrain as jt
from jaxtrain.cli import main
from jaxtrain.plan.hardware import measured_cpu
from jaxtrain.plan.targets import target_of
from jaxtrain.runtime.compiler import choose_options


def train(run_dir: Path, **overrides: Any) -> jt.Result:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return jt.run_config(TINY, run_dir=run_dir, overrides=dotted)


def test_a_run_directory_holds_what_the_design_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = train(
        tmp_path,
        train__steps=6,
        logging__report=True,
        logging__tensorboard=True,
        evaluation__every=2,
        evaluation__sample_prompt="The",
        evaluation__sample_tokens=10,
        checkpoint__every=2,
        profile__start_step=2,
    )
    names = {path.name for path in tmp_path.iterdir()}
    wanted = {"run.json", "metrics.jsonl", "checkpoints", "report.html", "tensorboard", "tokenizer.json", "sample.txt"}
    assert wanted <= names
    info = json.loads((tmp_path / "run.json").read_text())
    assert (info["status"], info["config"]["train"]["steps"], info["mesh"]["data"]) == ("done", 6, 8)
    assert {"config", "versions", "devices", "mesh", "git_commit"} <= set(info)
    # All that the compiler was given, which the banner does not show.
    assert info["compiler_options"] == dict(choose_options(jax.devices()[0], 8).used) != {}
    assert [row["step"] for row in rows(tmp_path) if "eval_loss" in row] == [2, 4, 6]
    assert list(tmp_path.glob("profile/**/*.xplane.pb")), "the profiler window wrote nothing"
    assert list(tmp_path.glob("tensorboard/events*"))
    assert (tmp_path / "sample.txt").read_text().startswith("The")
    report = (tmp_path / "report.html").read_text()
    assert "<svg" in report
    assert "http://" not in report.replace("http://www.w3.org", "")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "6"], "keep_last is 2"
    assert result.metrics["eval_loss"] == [row["eval_loss"] for row in rows(tmp_path) if "eval_loss" in row][-1]
    out, err = capfd.readouterr()
    for phase in ("reading data", "tracing", "compiling", "creating state"):
        assert f"{phase} … " in err
    assert "compiler options" not in err
    assert "ETA" in err
    assert "report.html" in out


@pytest.mark.long
def test_divergence_ends_the_run_with_advice(tmp_path: Path) -> None:
    """Weights that grow a million times in a step soon overflow, for good."""
    config = write_config(tmp_path, optimizer=dict(kind="sgd", learning_rate=1e6, clip_norm=None, momentum=0.0))
    # Its last step is no step that would be logged.
    words = ["train.max_skipped_in_a_row=3", "logging.every=50"]
    assert main(["train", str(config), "--run-dir", str(tmp_path / "run"), *words]) == 5
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["status"] == "diverged"
    last = [row for row in rows(tmp_path / "run") if "loss" in row][-1]
    assert last["skipped_steps"] == info["final"]["skipped_steps"] == 3
    assert last["step"] == info["final"]["step"] > 3


def test_auto_plans_the_rows_of_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = measured_cpu(dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), 1e11), 1e10, 2**34, 8)
    monkeypatch.setattr("jaxtrain.plan.search.this_machine", lambda: target_of(cpu, 8))
    data = jt.open_data({"kind": "synthetic", "task": "table", "num_columns": 8, "num_classes": 3})
    # The config's own data is text, which an mlp does not take.
    config = {"task": "classification", "parallel": "auto", "model": {"kind": "mlp", "hidden_dims": [16]}}
    result = jt.run_config(
        {**TINY, **config, "optimizer": {"kind": "sgd", "learning_rate": 0.05}},
        run_dir=tmp_path,
        overrides={"train.steps": 2, "train.global_batch_size": 32},
        data=data,
    )
    assert result.step == 2


BAD = {
    "batch that does not divide": (["train.global_batch_size=12"], 2, "global_batch_size=12 .* use 8 or 16"),
    "heads that do not divide": (
        ["model.num_heads=2", "parallel.tensor=4", "parallel.data=2"],
        2,
        "heads .* is 2, which does not divide by tensor=4",
    ),
    "empty file": (["data.path=empty.txt"], 3, "empty.txt"),
    "corrupt line": (["data.kind=jsonl", "data.path=bad.jsonl"], 3, "bad.jsonl:2"),
    "model of other data": (["model.kind=mlp"], 2, "model.kind=mlp does not take the tokens of data.kind=text"),
    "missing file": (["data.path=none.txt"], 3, "none.txt does not exist"),
    "unknown frozen parameter": (["optimizer.freeze=[nothing]"], 2, "'nothing' matches no parameter"),
    "unknown tensor to keep": (["remat.policy=names", "remat.names=[nothing]"], 2, "remat.names is 'nothing'"),
}


def test_bad_input_is_one_line_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": bad}\n')
    config = write_config(tmp_path)
    for overrides, code, words in BAD.values():
        assert main(["train", str(config), "--run-dir", "run", *overrides]) == code
        lines = capfd.readouterr().err.strip().splitlines()
        assert "Traceback" not in "".join(lines)
        assert [line for line in lines if line.startswith("jaxtrain: ")] == lines[-1:]
        assert re.search(words, lines[-1]), lines[-1]
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
