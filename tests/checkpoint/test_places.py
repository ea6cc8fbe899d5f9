"""Addresses of object stores without any store: how they are written, and what is said where a client is missing."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from jaxtrain.checkpoint import Checkpointer, places
from jaxtrain.checkpoint.places import EXTRAS, RemotePath
from jaxtrain.checkpoint.run_folder import (
    MARKER,
    checkpoint_folder,
    take,
    write_note,
)
from jaxtrain.config.schema import CheckpointConfig
from jaxtrain.errors import ConfigError
from jaxtrain.run.saving import take_folder


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


def test_steps_that_nobody_signed_are_not_taken_for_ones_own(tmp_path: Path):
    """As where `checkpoint.directory` names the folder of another run's directory."""
    run = tmp_path / "a"
    run.mkdir()
    others = with_step(tmp_path / "b" / "checkpoints", 4)
    with pytest.raises(ConfigError, match=r"^checkpoint.directory: [^\n]*does not name; [^\n]*--resume must[^\n]*$"):
        take(others, run, name="a", takes_over=False)
    assert list(run.iterdir()) == []
    assert not (others / MARKER).exists()
    take(others, run, name="a", takes_over=True)
    (others / MARKER).unlink()
    assert take(others, run, name="a", takes_over=False)[1] is None  # the note in the run directory knows it
    take(with_step(run / "checkpoints", 4), run, name="a", takes_over=False)


def test_a_copy_of_a_run_directory_is_another_run(tmp_path: Path):
    """It holds the same identity; a run directory that was moved has left nothing behind."""
    folder, first, copy = with_step(tmp_path / "store", 4), tmp_path / "a", tmp_path / "b"
    first.mkdir()
    write_note(first, folder, "an identity")
    take(folder, first, name="a", takes_over=False)
    shutil.copytree(first, copy)
    with pytest.raises(
        ConfigError, match=rf"holds the checkpoints of the run a \({first} on [^\n]*--resume must[^\n]*$"
    ):
        take(folder, copy, name="a", takes_over=False)
    moved = first.rename(tmp_path / "c")
    assert take(folder, moved, name="a", takes_over=False)[1] is None
    _, line = take(folder, copy, name="a", takes_over=True)
    assert f"taken over from the run a ({moved} on " in str(line)
    assert take(folder, copy, name="a", takes_over=False)[1] is None
    with pytest.raises(ConfigError, match="holds the checkpoints of the run a"):
        take(folder, moved, name="a", takes_over=False)


def test_a_run_that_goes_on_in_its_directory_forgets_where_it_was(tmp_path: Path):
    """Or its former checkpoints would be the ones that are evaluated."""
    write_note(tmp_path, with_step(tmp_path / "elsewhere", 4), "an identity")
    here = with_step(tmp_path / "checkpoints", 4)
    options = {"name": "a", "report": print}
    assert take_folder(CheckpointConfig(), tmp_path, resume="never", **options) == (here, None)
    assert checkpoint_folder(tmp_path) == tmp_path / "elsewhere"  # until what is there is moved aside
    assert take_folder(CheckpointConfig(), tmp_path, resume=None, **options) == (here, None)
    assert checkpoint_folder(tmp_path) == here
