"""Resume: 100 = 50 + restart + 50, bit for bit; on another mesh, within rounding; refused where it would be wrong."""

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from training_runs import TINY, losses, rows, run_process, saved_arrays, write_config

import jaxtrain as jt
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.tree import describe, difference, flatten
from jaxtrain.errors import PreemptedError
from jaxtrain.metrics.progress import Progress
from jaxtrain.run.resume import check_stream, config_changes, state_changes
from jaxtrain.train.assemble import build_step


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


@pytest.mark.parametrize(
    ("policy", "groups"),
    [
        pytest.param("fp32", [], id="fp32"),
        pytest.param("bf16", [], id="bf16", marks=pytest.mark.long),
        pytest.param("fp32", GROUPS, id="fp32, parameter groups", marks=pytest.mark.long),
    ],
)
def test_fifty_and_fifty_are_a_hundred_bit_for_bit(tmp_path: Path, policy: str, groups: Any) -> None:
    """What a kill after step 50 leaves, resumed by a new process, against a run that was never stopped."""
    config = write_config(
        tmp_path,
        precision=dict(policy=policy),
        checkpoint=dict(every=50),
        optimizer__schedule=dict(kind="cosine"),
        optimizer__groups=groups,
    )
    whole, half = tmp_path / "whole", tmp_path / "half"
    first = run_process(config, whole, "--emulate", "2")
    assert first.returncode == 0, first.stderr
    half.mkdir()
    shutil.copytree(whole / "checkpoints" / "50", half / "checkpoints" / "50")
    second = run_process(config, half, "--emulate", "2", "--resume", "must")
    assert second.returncode == 0, second.stderr
    before, after = losses(whole), losses(half)
    assert list(after) == list(range(51, 101))
    assert after == {step: before[step] for step in after}
    ends = [Checkpointer(folder / "checkpoints", read_only=True).info(100) for folder in (whole, half)]
    # Two 32-bit sums over every bit of every array: parameters, moments, average, keys, counts.
    assert ends[0].digests == ends[1].digests
    assert len(ends[0].digests) > 40
    a, b = saved_arrays(whole, 100), saved_arrays(half, 100)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    evaluated = [[row for row in rows(folder) if "eval_loss" in row][-1] for folder in (whole, half)]
    assert evaluated[0] == evaluated[1]


@pytest.mark.long
def test_a_longer_run_goes_on_where_the_shorter_one_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, train__steps=4)
    assert "resuming" not in capfd.readouterr().err
    result = train(tmp_path, train__steps=6)
    assert "resuming step 4" in (err := capfd.readouterr().err)
    assert "train.steps 4 -> 6" in err
    assert result.step == 6
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    record, logged = (tmp_path / "run.json").read_text(), rows(tmp_path)
    train(tmp_path, train__steps=6)
    assert "already trained to step 6" in capfd.readouterr().err
    assert (tmp_path / "run.json").read_text() == record, "a run that was done keeps its record"
    assert rows(tmp_path) == logged


# A setting, how it is named, and why no resume may take the change.
OTHERS = {
    "rate": (dict(optimizer__learning_rate=0.5), r"optimizer\.learning_rate 0\.001 -> 0\.5", None),
    "dropout": (dict(model__dropout=0.0), r"model\.dropout 0\.1 -> 0\.0", None),
    "width": (dict(model__embed_dim=64), r"model\.embed_dim 32 -> 64", "the state then has another form"),
    "fewer steps": (dict(train__steps=2), r"train\.steps 3 -> 2", None),
}


@pytest.mark.parametrize(("override", "words", "why_no_resume"), OTHERS.values(), ids=OTHERS)
def test_python_refuses_another_configuration_in_the_same_directory(
    trained: Path, override: dict[str, Any], words: str, why_no_resume: str | None
) -> None:
    """The metrics of the first run would be returned as those of the second."""
    ways = "use another run_dir, .*never.*must"
    if why_no_resume is not None:
        ways = f"{why_no_resume}, so no resume can go on; set it back, use another run_dir, or resume='never' to start"
    with pytest.raises(jt.ConfigError, match=f"{words}; {ways}") as caught:
        train(trained, resume=None, **{"train__steps": 3, **override})
    assert "\n" not in str(caught.value)
    assert list(losses(trained)) == [1, 2, 3]


@pytest.mark.long
def test_python_goes_on_with_what_trains_the_same(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    result = train(run, resume=None, train__steps=4, logging__every=2, parallel__fsdp=2, checkpoint__keep_last=1)
    assert result.step == 4
    changed = train(run, resume="must", train__steps=5, optimizer__learning_rate=0.5)
    assert changed.step == 5


@pytest.mark.long
def test_a_task_from_python_is_given_again_or_refused(trained: Path, tmp_path: Path, cli: Any) -> None:
    def named(name: str) -> jt.Task:
        return dataclasses.replace(jt.language_modeling(), name=name)

    run = tmp_path / "run"
    first = jt.run_config(TINY, run_dir=run, overrides={"train.steps": 1}, task=named("one"))
    again = jt.run_config(TINY, run_dir=run, overrides={"train.steps": 1}, task=named("one"))
    assert again.metrics["eval_loss"] == first.metrics["eval_loss"]
    with pytest.raises(jt.ConfigError, match="task one -> two; use another run_dir"):
        jt.run_config(TINY, run_dir=run, overrides={"train.steps": 1}, task=named("two"))
    for resume in (None, "must"):
        with pytest.raises(jt.ConfigError, match=r"with a task from Python \(one\).*task=\.\.\."):
            train(run, resume=resume, train__steps=2)
    answer = cli("train", str(write_config(tmp_path)), "--run-dir", str(run), "train.steps=2")
    assert answer.code == 2
    assert "with a task from Python (one)" in answer.err
    assert list(losses(run)) == [1]
    with pytest.raises(jt.ConfigError, match="task of the config -> one"):
        jt.run_config(TINY, run_dir=trained, overrides={"train.steps": 3}, task=named("one"))


def test_never_starts_anew_and_keeps_what_was_there(tmp_path: Path) -> None:
    train(tmp_path, train__steps=3)
    train(tmp_path, train__steps=2, resume="never")
    assert list(losses(tmp_path)) == [1, 2]
    kept = list((tmp_path / "previous").iterdir())
    assert len(kept) == 1
    assert list(losses(kept[0])) == [1, 2, 3]
    assert (kept[0] / "checkpoints" / "3").is_dir()


def test_a_mistake_that_compiling_shows_leaves_the_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, train__steps=2)

    def fail(*_: Any, **__: Any) -> None:
        raise jt.ConfigError("no such kernel; use another")

    monkeypatch.setattr("jaxtrain.train.step.TrainStep.trace", fail)
    with pytest.raises(jt.ConfigError, match="no such kernel"):
        train(tmp_path, train__steps=2, resume="never")
    assert not (tmp_path / "previous").exists()
    assert list(losses(tmp_path)) == [1, 2]


def test_a_finished_run_returns_its_training_metrics_again(tmp_path: Path) -> None:
    first, second = (train(tmp_path, train__steps=2).metrics for _ in range(2))
    assert second["loss"] == first["loss"]
    assert set(second) == set(first)


class StopAt(Progress):
    """Sends SIGTERM to this process where a step is shown."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        super().update(step, values)
        if step == self._number:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.long
def test_a_stop_where_an_evaluation_is_due_loses_none(tmp_path: Path) -> None:
    def run(name: str, progress: Progress | None = None) -> None:
        changes = {
            "train.steps": 6,
            "evaluation.every": 2,
            "checkpoint": dict(every=2, keep_last=9, keep_best=True),
        }
        jt.run_config(TINY, run_dir=tmp_path / name, overrides=changes, progress=progress)

    run("whole")
    with pytest.raises(PreemptedError, match="after step 4"):
        run("cut", StopAt(3))  # step 4 is under way when step 3 is shown
    run("cut")
    evaluated, saved = [], []
    for name in ("whole", "cut"):
        evaluated.append([(row["step"], row["eval_loss"]) for row in rows(tmp_path / name) if "eval_loss" in row])
        with Checkpointer(tmp_path / name / "checkpoints", read_only=True) as checkpointer:
            saved.append({step: checkpointer.verify(step).eval_loss for step in checkpointer.steps()})
    assert evaluated[0] == evaluated[1]
    assert [step for step, _ in evaluated[0]] == [2, 4, 6]
    assert saved[0] == saved[1] == dict(evaluated[0])


def test_must_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(jt.CheckpointError, match="no checkpoint") as caught:
        train(tmp_path, resume="must")
    assert "\n" not in str(caught.value)


def test_only_what_shapes_the_state_is_to_be_set_back() -> None:
    before = {"model": {"attention": "auto", "num_layers": 2}, "optimizer": {"kind": "adamw", "learning_rate": 1e-3}}
    after = {"model": {"attention": "blockwise", "num_layers": 3}, "optimizer": {"kind": "adamw", "learning_rate": 1.0}}
    changes = config_changes({**before, "precision": {"policy": "fp32"}}, {**after, "precision": {"policy": "fp16"}})
    assert len(changes) == 4
    assert state_changes(changes) == ["model.num_layers 2 -> 3", "precision.policy fp32 -> fp16"]
    # The keys of another kind are others: the kind says it all.
    other = {"optimizer": {"kind": "sgd", "momentum": 0.9}}
    assert config_changes({"optimizer": before["optimizer"]}, other) == ["optimizer.kind adamw -> sgd"]


# Settings before and after, and whether arrays of the state come, go or change.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "decay": (dict(weight_decay=0.0), dict(weight_decay=0.1), False),
    "decay of sgd": (dict(kind="sgd", weight_decay=0.1), dict(kind="sgd", weight_decay=0.0), False),
    "decay of muon": (dict(kind="muon"), dict(kind="muon", weight_decay=0.1), False),
    "clipping": (dict(clip_norm=None), dict(clip_norm=1.0), False),
    "schedule": (dict(schedule=dict(kind="constant")), dict(schedule=dict(kind="wsd", warmup_steps=3)), False),
    "rate": (dict(learning_rate=1e-3), dict(learning_rate=1e-2), False),
    "decays of moments": (dict(b1=0.0, b2=0.9), dict(b1=0.9, b2=0.99), False),
    "another momentum": (dict(kind="sgd", momentum=0.5), dict(kind="sgd", momentum=0.9), False),
    "nesterov": (dict(kind="sgd"), dict(kind="sgd", nesterov=True), False),
    "iterations of muon": (dict(kind="muon"), dict(kind="muon", newton_schulz_steps=6), False),
    "offload": (dict(), dict(offload=True), False),
    "another average": (dict(ema_decay=0.9), dict(ema_decay=0.99), False),
    "momentum": (dict(kind="sgd", momentum=0.0), dict(kind="sgd", momentum=0.9), True),
    "momentum of adafactor": (dict(kind="adafactor"), dict(kind="adafactor", b1=0.9), True),
    "factored sizes": (dict(kind="adafactor"), dict(kind="adafactor", min_dim_size_to_factor=32), True),
    "average": (dict(), dict(ema_decay=0.9), True),
    "frozen": (dict(), dict(freeze=["layers/0/*"]), True),
    "moments": (dict(), dict(moments="int8"), True),
    "matrices of muon": (dict(kind="muon"), dict(kind="muon", adamw=["layers/0/kernel"]), True),
    "kind": (dict(kind="adamw"), dict(kind="lion"), True),
    "parameter groups": (dict(), dict(groups=[dict(match=["layers/*"])]), True),
}


@pytest.mark.parametrize(("before", "after", "reshapes"), CHANGES.values(), ids=CHANGES)
def test_a_setting_that_changes_the_state_is_named(
    before: dict[str, Any], after: dict[str, Any], reshapes: bool
) -> None:
    """All other settings of an optimizer may change at a resume: its state keeps names, shapes and dtypes."""

    def described(optimizer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        values = {
            "task": "classification",
            "model": {"kind": "mlp", "hidden_dims": [128]},
            "data": {"kind": "digits"},
            "optimizer": {"kind": "adamw", **optimizer},
            "train": {"steps": 10},
        }
        config = jt.load_config(values).config
        step = build_step(config, input_shape=(64,), num_outputs=10, devices=jax.devices()[:1])
        leaves = flatten(step.abstract_state).leaves
        return {name: describe(leaf, name) for name, leaf in leaves.items()}, config.model_dump(mode="json")

    (old, old_config), (new, new_config) = described(before), described(after)
    assert (difference(old, new) is not None) == reshapes
    named = {change.partition(" ")[0] for change in state_changes(config_changes(old_config, new_config))}
    if reshapes:
        assert named == {f"optimizer.{key}" for key in after if before.get(key) != after[key]}


@pytest.mark.long
def test_weight_decay_may_be_switched_on_at_a_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, train__steps=2, optimizer__weight_decay=0.0)
    result = train(tmp_path, train__steps=3, optimizer__weight_decay=0.1)
    assert result.step == 3
    assert "optimizer.weight_decay 0.0 -> 0.1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("override", "error", "words"),
    [
        (dict(model__embed_dim=64), jt.CheckpointError, "of another model: .* arrays differ.*shape|differ"),
        (dict(model__num_layers=3), jt.CheckpointError, "of another model"),
        (dict(optimizer__kind="sgd"), jt.CheckpointError, "of another optimizer"),
        (
            dict(optimizer__ema_decay=None),
            jt.CheckpointError,
            "of another moving average: .*; changed since: optimizer.ema_decay 0.9 -> None; set that back",
        ),
        (dict(precision__policy="bf16_pure"), jt.CheckpointError, "of another model"),
        (dict(seed=1), jt.ConfigError, "another configuration: seed 0 -> 1, which no resume"),
        (dict(train__global_batch_size=16), jt.ConfigError, "train.global_batch_size 8 -> 16, which no resume"),
        (dict(data__sequence_length=16), jt.DataError, "other data"),
        # Another text, of which another tokenizer is learned first.
        pytest.param(dict(data__builtin="python_source"), jt.DataError, "other data", marks=pytest.mark.long),
    ],
    ids=["width", "depth", "optimizer", "average", "dtype", "seed", "batch", "length", "text"],
)
def test_a_checkpoint_of_something_else_is_refused_and_kept(
    trained: Path, tmp_path: Path, override: dict[str, Any], error: type[jt.UserError], words: str
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(error, match=words) as caught:
        train(tmp_path / "run", train__steps=4, **override)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before
    assert list(losses(tmp_path / "run")) == [1, 2, 3], "a refused resume must not touch the metrics"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(folder, train__steps=3)
    return folder


@pytest.mark.long
def test_eight_devices_then_four_then_one(tmp_path: Path) -> None:
    """The same global run on a shrinking machine as on one that stays: other sums, the same batches."""
    config = write_config(tmp_path, train__steps=12)
    layouts = [("8", "parallel.fsdp=4"), ("4", "parallel.tensor=2"), ("1", "parallel.fsdp=1")]
    for index, (devices, layout) in enumerate(layouts):
        done = run_process(config, tmp_path / "moved", f"train.steps={4 * (index + 1)}", layout, "--emulate", devices)
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


@pytest.mark.parametrize(
    "left",
    [
        pytest.param("", id="empty", marks=pytest.mark.long),
        pytest.param("{broken", id="cut off", marks=pytest.mark.long),
        pytest.param("[1]", id="another value", marks=pytest.mark.long),
    ],
)
def test_a_damaged_run_json_does_not_stop_a_resume(left, tmp_path):
    folder = tmp_path / "run"
    jt.run_config(TINY, overrides={"train.steps": 2}, run_dir=folder)
    (folder / "run.json").write_text(left)
    assert jt.run_config(TINY, overrides={"train.steps": 3}, run_dir=folder, resume="auto").step == 3
    assert json.loads((folder / "run.json").read_text())["status"] == "done"


HELD_OUT = {"kind": "arrays", "num_rows": 2, "sha256": "a"}
STREAMS = {
    "the same": ({"validation": HELD_OUT}, {"validation": HELD_OUT}, None),
    "other rows": (
        {"validation": HELD_OUT},
        {"validation": {**HELD_OUT, "sha256": "b"}},
        "evaluated on other held-out",
    ),
    "none any more": ({"validation": HELD_OUT}, {}, "evaluated on other held-out"),
}


@pytest.mark.parametrize("case", STREAMS)
def test_a_resume_with_other_held_out_rows_is_refused(case: str) -> None:
    saved, current, words = STREAMS[case]
    if words is None:
        check_stream(saved, current)
        return
    with pytest.raises(jt.DataError, match=words):
        check_stream(saved, current)
