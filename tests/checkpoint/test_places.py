"""Addresses of object stores without any store: how they are written, and what is said where a client is missing."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.checkpoint import Checkpointer, places, run_folder
from jaxtrain.checkpoint.places import EXTRAS, RemotePath
from jaxtrain.checkpoint.run_folder import MARKER, NOTE, checkpoint_folder
from jaxtrain.config.schema import CheckpointConfig
from jaxtrain.errors import ConfigError
from jaxtrain.run.checkpointing import RunSaves


def test_an_address_has_one_form():
    # A `Path` drops the second slash.
    for written, means in (("s3://bucket/a//b/", "s3://bucket/a/b"), ("gs:/bucket/a", "gs://bucket/a")):
        path = RemotePath(written)
        assert str(path) == means
        assert (path / "7").name == "7"
        assert (path / "7").parent == path
    for written in ("s3://", "s3://Bucket/a", "gs://bucket/../a", "gs://bucket/a#b"):
        with pytest.raises(ConfigError, match=f"^it: {written} is not a path in a bucket; write gs://bucket/name"):
            places.place_at(written, what="it")


def test_a_missing_client_names_the_extra(monkeypatch):
    package, extra = EXTRAS["s3"]
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    needs = rf"s3://bucket/a needs the package {package}: .*pip install '\.\[{extra}\]'$"
    with pytest.raises(ConfigError, match=f"^checkpoint directory: {needs}"):
        Checkpointer("s3://bucket/a")


def with_step(folder: Path, step: int) -> Path:
    """A folder that holds a step, as far as names tell."""
    (folder / str(step) / "jaxtrain").mkdir(parents=True)
    return folder


def take(folder: Path, run_dir: Path, *, identity: str = "an identity", takes_over: bool = False) -> str | None:
    """What is said where a start takes a folder."""
    run_dir.mkdir(exist_ok=True)
    lines: list[str] = []
    options = {"identity": identity, "takes_over": takes_over, "report": lines.append}
    run_folder.take(folder, run_dir, name=run_dir.name, **options)
    return "\n".join(lines) or None


def test_steps_that_nobody_signed_are_not_taken_for_ones_own(tmp_path: Path):
    """As where `checkpoint.directory` names the folder of another run's directory."""
    run = tmp_path / "a"
    others = with_step(tmp_path / "b" / "checkpoints", 4)
    with pytest.raises(ConfigError, match=r"^checkpoint.directory: [^\n]*does not name, [^\n]*--resume must[^\n]*$"):
        take(others, run)
    assert list(run.iterdir()) == []
    assert not (others / MARKER).exists()
    assert take(others, run, takes_over=True) is None
    assert take(others, run) is None
    assert take(with_step(run / "checkpoints", 4), run) is None


def test_a_run_is_told_by_its_identity_wherever_it_starts(tmp_path: Path):
    """On a new machine the run directory is gone; a copy of it whose config was changed is another run."""
    folder, first, second = with_step(tmp_path / "store", 4), tmp_path / "a", tmp_path / "b"
    take(folder, first, takes_over=True)
    assert take(folder, first, identity="another") is None, "its directory says that it is the run"
    assert take(folder, first) is None
    assert f"taken over from the run a ({first} on " in str(take(folder, second))
    shutil.copytree(second, first, dirs_exist_ok=True)
    with pytest.raises(ConfigError, match=rf"the run b \({second} on [^\n]*another name, config[^\n]*--resume must"):
        take(folder, first, identity="another")
    assert take(folder, second) is None
    assert "taken over from the run b" in str(take(folder, first, identity="another", takes_over=True))
    (first / NOTE).unlink()  # at the same path on a fresh disk
    with pytest.raises(ConfigError, match="holds the checkpoints of the run a"):
        take(folder, first)


def test_a_run_that_goes_on_in_its_directory_forgets_where_it_was(tmp_path: Path):
    """Or its former checkpoints would be the ones that are evaluated."""
    elsewhere, here = with_step(tmp_path / "elsewhere", 4), with_step(tmp_path / "checkpoints", 4)
    (tmp_path / NOTE).write_text(json.dumps({"directory": str(elsewhere)}))
    options = {"name": "a", "identity": "an identity", "report": print}

    def opened(resume: str | None) -> Any:
        return RunSaves(CheckpointConfig(), tmp_path, resume=resume, **options).checkpointer.directory

    assert checkpoint_folder(tmp_path) == elsewhere
    assert opened(None) == here
    assert checkpoint_folder(tmp_path) == here
