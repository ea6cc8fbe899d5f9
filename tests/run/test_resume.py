"""Resume: 100 = 50 + restart + 50, bit for bit; on another mesh, within rounding; refused where it would be wrong."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import TINY, environment, losses, rows, run_process, saved_arrays, write_config

import jaxtrain as jt
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config import load_config
from jaxtrain.data.configured import open_run_data
from jaxtrain.run.directory import set_aside
from jaxtrain.run.resume import check_stream


def train(
    run_dir: Path, *, config: dict[str, Any] | None = None, resume: str | None = "auto", **overrides: Any
) -> jt.Result:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return jt.run_config(config or TINY, run_dir=run_dir, resume=resume, overrides=dotted)


# One for the first half of the parameters, with moments in 8 bits, and another for the rest.
GROUPS: list[dict[str, Any]] = [
    dict(match=["blocks/*"], learning_rate_factor=2.0, optimizer=dict(kind="adamw", moments="int8")),
    dict(match=["*"], optimizer=dict(kind="lion")),
]


# A run in a process with two devices, which kills itself after a step.
PROGRAM = """
import os, signal, sys
import jaxtrain as jt
from jaxtrain.runtime import distributed

distributed.start(emulate=2)

config, run_dir, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
kill = jt.Callback(on_step=lambda moment: os.kill(os.getpid(), signal.SIGKILL) if moment.step == last else None)
jt.run_config(config, run_dir=run_dir, callbacks=[kill], resume="auto")
"""


@pytest.mark.parametrize(
    ("policy", "groups"),
    [
        pytest.param("fp32", [], id="fp32"),
        pytest.param("bf16", GROUPS, id="bf16, parameter groups", marks=pytest.mark.long),
    ],
)
def test_fifty_and_fifty_are_a_hundred_bit_for_bit(tmp_path: Path, policy: str, groups: Any) -> None:
    """A process that is killed after step 50 and a new one that goes on, against a run that was never stopped."""
    config = write_config(
        tmp_path,
        precision=dict(policy=policy),
        checkpoint=dict(every=25),
        model__num_layers=1,
        optimizer__schedule=dict(kind="cosine"),
        optimizer__groups=groups,
    )
    whole, half = tmp_path / "whole", tmp_path / "half"

    def start(folder: Path, last: int) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", PROGRAM, str(config), str(folder), str(last)]
        return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment())

    alone, killed = start(whole, 0), start(half, 57)
    killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert max(losses(half)) in (56, 57)
    again = start(half, 0)
    for process in (alone, again):
        errors = process.communicate(timeout=300)[1]
        assert process.returncode == 0, errors
    resumed = int(errors.split("resuming step ")[1].split()[0])
    assert resumed in (25, 50), "one save may be in flight besides the steps since the last"
    assert losses(half) == losses(whole)
    assert list(losses(half)) == list(range(1, 101))
    ends = [Checkpointer(folder / "checkpoints", read_only=True).info(100) for folder in (whole, half)]
    # Two 32-bit sums over every bit of every array: parameters, moments, average, keys, counts.
    assert ends[0].digests == ends[1].digests
    assert len(ends[0].digests) > 20
    a, b = saved_arrays(whole, 100), saved_arrays(half, 100)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    evaluated = [[row for row in rows(folder) if "eval_loss" in row][-1] for folder in (whole, half)]
    assert evaluated[0] == evaluated[1]


@pytest.mark.long
def test_a_longer_run_goes_on_where_the_shorter_one_ended(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    result = train(run, resume=None, train__steps=5, checkpoint__keep_last=1)
    assert "resuming step 3" in (err := capfd.readouterr().err)
    assert "train.steps 3 -> 5" in err
    assert result.step == 5
    assert list(losses(run)) == [1, 2, 3, 4, 5]
    record, logged = (run / "run.json").read_text(), rows(run)
    again = train(run, train__steps=5, checkpoint__keep_last=1)
    assert "already trained to step 5" in capfd.readouterr().err
    assert (run / "run.json").read_text() == record, "a run that was done keeps its record"
    assert rows(run) == logged
    assert again.metrics["loss"] == result.metrics["loss"]
    assert set(again.metrics) == set(result.metrics)


# A setting, and how it is named.
OTHERS = {
    "rate": (dict(optimizer__learning_rate=0.5), r"optimizer\.learning_rate 0\.001 -> 0\.5"),
    "width": (dict(model__embed_dim=64), r"model\.embed_dim 32 -> 64"),
}


@pytest.mark.parametrize(("override", "words"), OTHERS.values(), ids=OTHERS)
def test_python_refuses_another_configuration_in_the_same_directory(
    trained: Path, override: dict[str, Any], words: str
) -> None:
    """The metrics of the first run would be returned as those of the second."""
    with pytest.raises(jt.ConfigError, match=f"{words}; use another run_dir, .*never.*must") as caught:
        train(trained, resume=None, **{"train__steps": 3, **override})
    assert "\n" not in str(caught.value)
    assert list(losses(trained)) == [1, 2, 3]


def test_passes_over_the_rows_are_the_same_run_as_their_steps(trained: Path) -> None:
    num_rows = len(open_run_data(load_config(TINY).config).train)
    assert train(trained, resume=None, train__epochs=2.5 * 8 / num_rows).step == 3
    assert json.loads((trained / "run.json").read_text())["config"]["train"]["epochs"] is None


@pytest.mark.long
def test_python_goes_on_with_what_trains_the_same(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    assert train(run, resume=None, train__steps=4, logging__every=2, parallel__fsdp=2).step == 4
    changed = train(run, resume="must", train__steps=5, optimizer__learning_rate=0.5, optimizer__weight_decay=0.0)
    assert changed.step == 5


def test_never_starts_anew_and_keeps_what_was_there(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")

    def fail(*_: Any, **__: Any) -> None:
        raise jt.ConfigError("no such kernel; use another")

    with monkeypatch.context() as patch:
        patch.setattr("jaxtrain.train.step.TrainStep.trace", fail)
        with pytest.raises(jt.ConfigError, match="no such kernel"):
            train(run, train__steps=2, resume="never")
    assert not (run / "previous").exists(), "a mistake that compiling shows leaves the earlier run"
    assert list(losses(run)) == [1, 2, 3]
    train(run, train__steps=2, resume="never")
    assert list(losses(run)) == [1, 2]
    (kept,) = (run / "previous").iterdir()
    assert list(losses(kept)) == [1, 2, 3]
    assert (kept / "checkpoints" / "3").is_dir()


def test_must_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(jt.CheckpointError, match="no checkpoint") as caught:
        train(tmp_path, resume="must")
    assert "\n" not in str(caught.value)


SOMETHING_ELSE: list[tuple[dict[str, Any], type[jt.UserError], str]] = [
    (dict(model__embed_dim=64), jt.CheckpointError, "of another model: .* arrays differ"),
    (dict(optimizer__kind="sgd"), jt.CheckpointError, "of another optimizer"),
    (dict(optimizer__ema_decay=None), jt.CheckpointError, "of another moving average: .*ema_decay 0.9 -> None"),
    (dict(spikes={}), jt.CheckpointError, "of another kind: .*spikes.*; set it back"),
    (dict(precision__policy="fp16"), jt.CheckpointError, "of another kind: .*loss_scale.*; set it back"),
    (dict(seed=1), jt.ConfigError, "another configuration: seed 0 -> 1, which no resume"),
    (dict(data__sequence_length=16), jt.DataError, "other data"),
]


def test_a_checkpoint_of_something_else_is_refused_and_kept(trained: Path) -> None:
    before = sorted(path.name for path in (trained / "checkpoints").iterdir())
    for override, error, words in SOMETHING_ELSE:
        with pytest.raises(error, match=rf"^[^\n]*{words}[^\n]*$"):
            train(trained, train__steps=4, **override)
    assert sorted(path.name for path in (trained / "checkpoints").iterdir()) == before
    assert list(losses(trained)) == [1, 2, 3], "a refused resume must not touch the metrics"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(folder, train__steps=3)
    return folder


@pytest.mark.long
def test_eight_devices_then_four_then_one(tmp_path: Path) -> None:
    """The same global run on a shrinking machine as on one that stays: other sums, the same batches."""
    config = write_config(tmp_path, train__steps=12)
    train(tmp_path / "moved", train__steps=4, parallel__fsdp=4)
    for steps, devices, layout in ((8, "4", "parallel.tensor=2"), (12, "1", "parallel.fsdp=1")):
        done = run_process(config, tmp_path / "moved", f"train.steps={steps}", layout, "--emulate", devices)
        assert done.returncode == 0, done.stderr
    train(tmp_path / "still", train__steps=12)
    moved, still = losses(tmp_path / "moved"), losses(tmp_path / "still")
    assert list(moved) == list(still) == list(range(1, 13))
    # Sums in another order: 2^-24 each, see tests/parallel/test_layouts.py.
    np.testing.assert_allclose(list(moved.values()), list(still.values()), rtol=1e-5)
    a, b = saved_arrays(tmp_path / "moved", 12), saved_arrays(tmp_path / "still", 12)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=2e-5, err_msg=name)


def test_metrics_have_the_keys_of_the_design(trained: Path) -> None:
    logged = [row for row in rows(trained) if "loss" in row]
    assert list(logged[0])[:11] == [
        "step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds",
        "data_wait_seconds", "model_flops_utilization", "device_memory_bytes", "skipped_steps",
    ]  # fmt: skip
    evaluated = [row for row in rows(trained) if "eval_loss" in row]
    assert [row["step"] for row in evaluated] == [3]


def test_a_resume_with_other_held_out_rows_is_refused() -> None:
    saved = {"validation": {"kind": "arrays", "num_rows": 2, "sha256": "a"}}
    check_stream(saved, saved, run_dir=Path("run"))
    for current in ({"validation": {**saved["validation"], "sha256": "b"}}, {}):
        with pytest.raises(jt.DataError, match="evaluated on other held-out"):
            check_stream(saved, current, run_dir=Path("run"))


def test_two_runs_set_aside_within_a_second_both_stay(tmp_path: Path) -> None:
    """With all that is theirs."""
    for content in ("first", "second"):
        (tmp_path / "run.json").write_text(content)
        (tmp_path / "checkpoints" / "1").mkdir(parents=True)
        folder = set_aside(tmp_path)
        assert folder is not None
        assert [path.name for path in tmp_path.iterdir()] == ["previous"]
    kept = sorted((tmp_path / "previous").iterdir())
    assert [(path / "run.json").read_text() for path in kept] == ["first", "second"]
