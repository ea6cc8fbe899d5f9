"""A verified step is there at any time, whatever fails."""

import itertools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxtrain.checkpoint import Checkpointer, upkeep
from jaxtrain.checkpoint.directory import SaveError
from jaxtrain.config.schema import CheckpointConfig
from jaxtrain.run.checkpointing import RunSaves


def state(number: int) -> dict[str, Any]:
    return {"step": jnp.int32(number), "x": jnp.arange(64, dtype=jnp.float32) * number}


def save(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, state(step), metadata={"step": step})
    checkpointer.wait()


def damage(folder: Path, step: int) -> None:
    files = [path for path in (folder / str(step) / "state").rglob("d/*") if path.is_file()]
    max(files, key=lambda path: path.stat().st_size).write_bytes(b"damage")


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


def test_processes_agree_when_minutes_have_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one second, and of ten from step 200 on; a save every two minutes; clocks that are apart."""
    now, answers, saved = 0.0, [], []
    clocks = [lambda: now, lambda: 1e6 + 3 * now]
    agree = [lambda decide: answers.append(decide()) or answers[-1], lambda decide: answers[-1]]
    options = {"name": "a", "identity": "an identity", "resume": None, "report": print}
    processes = []
    for clock in clocks:
        monkeypatch.setattr("jaxtrain.run.checkpointing.time.monotonic", clock)
        processes.append(RunSaves(CheckpointConfig(every_minutes=2), tmp_path, **options))
    monkeypatch.setattr("jaxtrain.run.checkpointing.jax.process_count", lambda: 2)
    for number in range(1, 301):
        now += 1.0 if number < 200 else 10.0
        due = []
        for process, clock, answer in zip(processes, clocks, agree, strict=True):
            monkeypatch.setattr("jaxtrain.run.checkpointing.time.monotonic", clock)
            monkeypatch.setattr("jaxtrain.run.checkpointing.from_process_0", answer)
            due.append(process.is_due(number))
            if due[-1]:
                process._saved_at = clock()
        assert due[0] == due[1]
        saved += [number] if due[0] else []
    assert saved[0] == 120
    # Every tenth step is asked.
    assert {after - before for before, after in itertools.pairwise(saved[2:])} == {20}
