"""A verified step is there at any time, whatever fails; the mirror holds what the directory holds."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxtrain.checkpoint import Checkpointer, upkeep
from jaxtrain.checkpoint.directory import SaveError
from jaxtrain.config.schema import CheckpointConfig
from jaxtrain.errors import ConfigError
from jaxtrain.run.saving import RunSaves


def state(number: int) -> dict[str, Any]:
    return {"step": jnp.int32(number), "x": jnp.arange(64, dtype=jnp.float32) * number}


def save(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, state(step), metadata={"step": step})
    checkpointer.wait()


def damage(folder: Path, step: int) -> None:
    files = [path for path in (folder / str(step) / "state").rglob("d/*") if path.is_file()]
    max(files, key=lambda path: path.stat().st_size).write_bytes(b"damage")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_nothing_is_deleted_for_a_step_that_does_not_read_as_it_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        save(checkpointer, 1)
        # What a bad memory bar or disk does between the write and the read.
        found = upkeep.verify_on_host
        monkeypatch.setattr(
            upkeep, "verify_on_host", lambda info, advance: (damage(tmp_path, info.step), found(info, advance))
        )
        with pytest.raises(SaveError, match=r"checkpoint .*2 .*read back after the save \(renamed to 2\.corrupt-"):
            save(checkpointer, 2)
        assert checkpointer.steps() == [1]
        monkeypatch.undo()
        save(checkpointer, 3)
        assert checkpointer.steps() == [3]


def test_the_mirror_holds_what_the_directory_holds(tmp_path: Path) -> None:
    here, there = tmp_path / "run", tmp_path / "mirror"
    settings: dict[str, Any] = dict(keep_last=1, keep_every=4, mirror=there)
    with Checkpointer(here, **settings) as checkpointer:
        save(checkpointer, 4, 5, 6)
        assert names(there) == {"4", "6", "mirror_of.json"}
        checkpointer.restore(state(0), step=4)
        save(checkpointer, 5)  # going back: step 6 is abandoned, here and there
        assert checkpointer.steps() == [4, 5]
    left = {name.partition("-")[0] for name in names(there)}
    assert left == {"4", "5", "mirror_of.json", "abandoned"}
    damage(here, 5)
    lines: list[str] = []
    with Checkpointer(here, **settings, report=lines.append) as checkpointer:
        assert int(checkpointer.restore(state(0))["step"]) == 5
    assert "copied back" in lines[0]
    shutil.rmtree(here)
    with Checkpointer(here, **settings) as checkpointer:
        assert checkpointer.latest_step() == 5
        checkpointer.begin_anew()
        shutil.rmtree(here)
        save(checkpointer, 1)
        assert names(here) == {"1"}
    assert "5" not in names(there)


def test_a_mirror_belongs_to_one_directory(tmp_path: Path) -> None:
    lines: list[str] = []
    with (
        Checkpointer(tmp_path / "a", mirror=tmp_path / "mirror") as one,
        Checkpointer(tmp_path / "c", mirror=tmp_path / "mirror", report=lines.append) as other,
    ):
        save(one, 1, 2)
        save(other, 1)  # neither had made a copy when both looked whose it is
    assert names(tmp_path / "mirror") == {"1", "2", "mirror_of.json"}
    assert "holds the copies of" in lines[0]
    with pytest.raises(ConfigError, match=r"mirror holds the copies of .*/a, not of .*/b; name another folder"):
        Checkpointer(tmp_path / "b", mirror=tmp_path / "mirror")
    for inside in ("a/mirror", "a", "."):
        with pytest.raises(ConfigError, match=r"mirror: .* overlaps .*/a; use a folder on another disk"):
            Checkpointer(tmp_path / "a", mirror=tmp_path / inside)


def test_processes_agree_when_minutes_have_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one second, and of ten from step 200 on; a save every two minutes; clocks that are apart."""
    now, answers, saved = 0.0, [], []
    clocks = [lambda: now, lambda: 1e6 + 3 * now]
    agree = [lambda decide: answers.append(decide()) or answers[-1], lambda decide: answers[-1]]
    monkeypatch.setattr("jaxtrain.run.saving.jax.process_count", lambda: 2)
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        processes = []
        for clock in clocks:
            monkeypatch.setattr("jaxtrain.run.saving.time.monotonic", clock)
            processes.append(RunSaves(checkpointer, CheckpointConfig(every_minutes=2), report=print))
        for number in range(1, 301):
            now += 1.0 if number < 200 else 10.0
            due = []
            for process, clock, answer in zip(processes, clocks, agree, strict=True):
                monkeypatch.setattr("jaxtrain.run.saving.time.monotonic", clock)
                monkeypatch.setattr("jaxtrain.run.saving.from_process_0", answer)
                due.append(process.is_due(number))
                if due[-1]:
                    process._saved_at = clock()
            assert due[0] == due[1]
            saved += [number] if due[0] else []
    assert saved[0] == 120
    # Every tenth step is asked.
    assert {after - before for before, after in itertools.pairwise(saved[2:])} == {20}
