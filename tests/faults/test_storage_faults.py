"""Real faults of the disk under a run: deleted, moved, full, replaced, read-only; nothing that was saved is lost."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import jaxtrain as jt
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.errors import StorageError
from jaxtrain.metrics.progress import Progress

SMALL: dict[str, Any] = {
    "name": "small",
    "task": "classification",
    "model": dict(kind="mlp", hidden_dims=[16]),
    "data": dict(kind="digits"),
    "optimizer": dict(kind="adamw", learning_rate=1e-3, schedule=dict(kind="constant")),
    "train": dict(steps=12, global_batch_size=8),
    "evaluation": dict(max_batches=1),
    "checkpoint": dict(every=None),
    "logging": dict(every=1, tensorboard=False, report=False),
}


class At(Progress):
    """Does something once a step is shown, and keeps every line that people see."""

    def __init__(self, actions: Mapping[int, Callable[[], None]]) -> None:
        super().__init__(live=False)
        self._actions, self.lines = actions, []

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        super().update(step, values)
        if step in self._actions:
            self._actions[step]()

    def message(self, text: str) -> None:
        self.lines.append(text)
        super().message(text)

    def said(self, *words: str) -> list[str]:
        """The lines that hold all of these words."""
        return [line for line in self.lines if all(word in line for word in words)]


def train(
    run_dir: Path,
    actions: Mapping[int, Callable[[], None]] | None = None,
    *,
    resume: str | None = "auto",
    **changes: Any,
) -> tuple[jt.Result, At]:
    """Train SMALL with dotted changes (`checkpoint__every=2`)."""
    shown = At(actions or {})
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    return jt.run_config(SMALL, run_dir=run_dir, resume=resume, overrides=overrides, progress=shown), shown


@contextlib.contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A file system of a few MiB in memory; the test is skipped where nobody may mount one."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        if os.geteuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting a small disk takes root")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path, *, leave: int = 0) -> Path:
    """Fill the disk of a folder up to some bytes; returns the file that takes the space."""
    path = folder / "ballast"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for size in (1 << 20, 1 << 12, 1):
        with contextlib.suppress(OSError):
            while os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize - leave >= size:
                if os.write(descriptor, bytes(size)) < size:
                    raise OSError(errno.ENOSPC, "full")
    os.close(descriptor)
    return path


STEPS = 12


def end(run_dir: Path) -> dict[str, tuple[int, int]]:
    """The digests of every array after the last step."""
    return Checkpointer(run_dir / "checkpoints", read_only=True).info(STEPS).digests


def logged(run_dir: Path) -> list[tuple[int, float]]:
    """(step, loss) of every row of training."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def once_complete(run_dir: Path, step: int, act: Callable[[], object]) -> Callable[[], None]:
    """Do something once a step is saved: a save that is under way writes into what is deleted."""

    def go() -> None:
        deadline = time.monotonic() + 60
        while not (run_dir / "checkpoints" / str(step)).is_dir() and time.monotonic() < deadline:
            time.sleep(0.01)
        act()

    return go


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(run_dir)
    return run_dir


# What is done to the run directory after step 4 -> the first row that is there afterwards.
LOST: dict[str, tuple[Callable[[Path], object], int]] = {
    "all of it deleted": (shutil.rmtree, 6),
    "its checkpoints deleted": (lambda run_dir: shutil.rmtree(run_dir / "checkpoints"), 1),
}


@pytest.mark.parametrize(
    ("lose", "first"),
    [pytest.param(*row, id=name, marks=[pytest.mark.long] * (row[0] != shutil.rmtree)) for name, row in LOST.items()],
)
def test_a_run_goes_on_in_a_directory_that_is_deleted_meanwhile(
    tmp_path: Path, undisturbed: Path, lose: Callable[[Path], object], first: int
) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, {5: once_complete(run_dir, 4, lambda: lose(run_dir))}, checkpoint__every=4)
    assert logged(run_dir) == [row for row in logged(undisturbed) if row[0] >= first]
    assert json.loads((run_dir / "run.json").read_text())["status"] == "done"
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"8", "12"}
    assert end(run_dir) == end(undisturbed)
    # Another process finds the run whole.
    result, _ = train(run_dir, train__steps=STEPS + 1, checkpoint__every=None)
    assert result.step == STEPS + 1


@pytest.mark.long
def test_a_damaged_run_json_is_one_line_and_training_writes_it_again(tmp_path: Path, undisturbed: Path) -> None:
    run_dir = shutil.copytree(undisturbed, tmp_path / "run")
    (run_dir / "run.json").write_bytes(b'{"name": "small", "config": {"tr')
    with pytest.raises(jt.ConfigError, match=r"run\.json holds no config"):
        jt.open_run(run_dir)
    assert train(run_dir, train__steps=STEPS + 1)[0].step == STEPS + 1
    assert jt.open_run(run_dir).evaluate()["eval_loss"] > 0


def test_a_disk_that_is_full_for_a_while_costs_nothing(undisturbed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with small_disk("2m") as disk:
        run_dir, ballast = disk / "run", disk / "ballast"
        actions = {5: once_complete(run_dir, 4, lambda: fill(disk)), 9: ballast.unlink}
        _, shown = train(run_dir, actions, checkpoint__every=2, logging__tensorboard=True)
        (first, second) = shown.said("cannot save checkpoint")
        assert "checkpoints/6: No space left on device" in first
        assert "training continues, step 4 is saved, and stops after 2 more such saves in a row" in first
        assert "stops after 1 more" in second
        assert logged(run_dir) == logged(undisturbed), "rows that could not be written waited"
        assert end(run_dir) == end(undisturbed)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.long
def test_a_disk_that_stays_full_ends_the_run_with_what_was_saved(capfd: pytest.CaptureFixture[str]) -> None:
    with small_disk("2m") as disk:
        run_dir = disk / "run"
        actions = {5: once_complete(run_dir, 4, lambda: fill(disk))}
        with pytest.raises(StorageError, match=r"3 saves in a row failed \(.*\), step 4 is saved$") as caught:
            train(run_dir, actions, checkpoint__every=2)
        assert caught.value.exit_code == 1
        assert Checkpointer(run_dir / "checkpoints", read_only=True).verify(4).step == 4
        assert json.loads((run_dir / "run.json").read_text())["config"]["train"]["steps"] == STEPS
        (disk / "ballast").unlink()
        result, _ = train(run_dir)
        assert result.step == STEPS
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.long
def test_a_disk_that_is_full_from_the_start(cli: Any) -> None:
    with small_disk("1m") as disk:
        fill(disk)
        config = disk.parent / f"{disk.name}.yaml"
        config.write_text(json.dumps(SMALL))
        answer = cli("train", str(config), "--run-dir", str(disk / "run"))
        config.unlink()
    assert answer.code == 1
    assert answer.err.splitlines()[-1].endswith("No space left on device; free space, or use another --run-dir")
    assert "Traceback" not in answer.err
