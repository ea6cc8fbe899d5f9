"""A run whose checkpoints are elsewhere: the same line on a machine with nothing else of it ends as if undisturbed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_early_stopping import overfit
from test_fit import X, Y, fit, stop_after
from training_runs import losses, rows

import jaxtrain as jt


def test_the_same_line_on_fresh_disks_ends_like_one_run(tmp_path: Path) -> None:
    """Early stopping goes on too: it compares evaluations from before the disk was lost."""
    store, run = tmp_path / "store", tmp_path / "machine" / "run"
    checkpoint = {"every": 2, "keep_last": 1, "keep_best": True}
    whole = overfit(tmp_path / "whole" / "run", resume="auto", checkpoint=checkpoint)
    assert whole.step == 8, "stopped early"
    for last in (3, 5, None):
        callbacks: list[Any] = [jt.EarlyStopping(patience=3)]
        arguments = {"resume": "auto", "checkpoint": {**checkpoint, "directory": str(store)}}
        if last is None:
            result = overfit(run, callbacks=callbacks, **arguments)
            break
        with pytest.raises(jt.PreemptedError):
            overfit(run, callbacks=[*callbacks, stop_after(last)], **arguments)
        shutil.rmtree(run.parent)
    assert (result.step, result.metrics["eval_loss"]) == (8, whole.metrics["eval_loss"])
    assert losses(run) == losses(whole.run_dir)
    evaluated = [[row for row in rows(folder) if "eval_loss" in row] for folder in (run, whole.run_dir)]
    assert evaluated[0] == evaluated[1]
    ends = [jt.Checkpointer(folder, read_only=True) for folder in (store, whole.run_dir / "checkpoints")]
    assert ends[0].steps() == ends[1].steps() == [2, 8]
    assert ends[0].info().digests == ends[1].info().digests


def test_another_run_does_not_take_it_up(tmp_path: Path) -> None:
    """On another machine; where it was trained, a run of other settings may begin anew."""
    run, other = tmp_path / "a" / "run", tmp_path / "b" / "run"
    arguments = {"steps": 2, "resume": "auto", "checkpoint": {"directory": str(tmp_path / "store")}}
    fit(run, **arguments)
    for changes in ({"clip_norm": 1.0}, {"seed": 1}, {"data": (X + 1, Y)}):
        with pytest.raises(jt.ConfigError, match=r"^checkpoint.directory: [^\n]*of the run run [^\n]*another name"):
            fit(other, **{**arguments, **changes})
    with pytest.raises(jt.ConfigError, match="another name"):
        fit(tmp_path / "b" / "second", **arguments)
    assert fit(other, **{**arguments, "steps": 3}).step == 3
    fit(other, **{**arguments, "steps": 1, "clip_norm": 1.0, "resume": "never"})
    assert list(losses(other)) == [1]


@pytest.mark.parametrize("name", ["store/jaxtrain_run.json", "run/checkpoints.json"])
def test_a_damaged_note_is_one_line(tmp_path: Path, name: str) -> None:
    arguments = {"steps": 1, "checkpoint": {"directory": str(tmp_path / "store")}}
    fit(tmp_path / "run", **arguments)
    for content in ("{", "[]", json.dumps({"run": "a"})):
        (tmp_path / name).write_text(content)
        with pytest.raises(jt.CheckpointError, match=rf"^[^\n]*{name} is damaged; delete it[^\n]*$"):
            fit(tmp_path / "run", **arguments)
