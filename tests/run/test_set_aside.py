"""What belongs to an earlier run, and what a run.json that is written again says."""

import json
from pathlib import Path
from typing import Any

import pytest

import jaxtrain as jt
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.run.mended import mend_run
from jaxtrain.run.resume import set_aside


def test_steps_that_were_not_finite_go_with_the_run_that_did_them(tmp_path: Path) -> None:
    (tmp_path / "nonfinite").mkdir()
    (tmp_path / "nonfinite" / "step_3.json").write_text("{}")
    previous = set_aside(tmp_path)
    assert previous is not None
    assert (previous / "nonfinite" / "step_3.json").is_file()
    assert not (tmp_path / "nonfinite").exists()


def test_a_run_json_that_is_written_again_has_the_roll_backs(tmp_path: Path) -> None:
    rolled_back = [{"from_step": 3, "to_step": 1}]
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        metadata = {"config": {"train": {"steps": 9}}, "rolled_back": rolled_back}
        checkpointer.save(4, {"x": 1.0}, metadata=metadata)
    lines: list[str] = []
    mend_run(tmp_path, lines.append)
    assert json.loads((tmp_path / "run.json").read_text())["rolled_back"] == rolled_back
    assert "it was written again from the checkpoint of step 4" in lines[0]


@pytest.mark.parametrize(
    ("saves", "said"),
    [
        ([{"step": 0}, {"step": 400}, {"step": 478}], ["run.json names a save of step 478"]),
        ([{"step": 0}], []),
        ([None, {"step": "9"}], []),
    ],
    ids=["saved", "killed before its first save", "damaged"],
)
def test_a_start_names_the_checkpoints_that_are_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], saves: list[Any], said: list[str]
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "run.json").write_text(json.dumps({"saves": saves, "config": {}}))
    jt.run_config("digits_mlp", run_dir=run_dir, overrides={"train.steps": 1, "logging.report": False})
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("run.json names")]
    assert [line.split(",")[0] for line in lines] == said
    assert all("holds no checkpoint: training begins again at step 0" in line for line in lines)


def test_two_runs_set_aside_within_a_second_both_stay(tmp_path: Path) -> None:
    for content in ("first", "second"):
        (tmp_path / "run.json").write_text(content)
        (tmp_path / "checkpoints" / "1").mkdir(parents=True)
        folder = set_aside(tmp_path)
        assert folder is not None
        assert (folder / "run.json").read_text() == content
    kept = sorted((tmp_path / "previous").iterdir())
    assert [(path / "run.json").read_text() for path in kept] == ["first", "second"]
