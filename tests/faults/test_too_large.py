"""What no memory holds is one line before it is allocated: batches, states, and batches of all data many times."""

import re

import pytest

import jaxtrain as jt
from jaxtrain.cli import main
from jaxtrain.run import memory_check

TINY = ["data.kind=synthetic", "data.task=table", "data.num_rows=16", "train.steps=1", "logging.report=false"]
# id: (settings, the line); the memory is that of any machine of today
LARGE = {
    "a batch of all data 1,000,000 times": (
        ["train.global_batch_size=16000000"],
        r"train\.global_batch_size=16000000: every batch would hold the 1[0-9] rows of the data more than 10000",
    ),
    "a state": (
        ["model.hidden_dims=[1048576, 1048576]"],
        r"the state of the model takes [0-9.]+ TiB of this machine, which has [0-9.]+ [GT]iB of memory; ",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(("words", "line"), LARGE.values(), ids=LARGE)
def test_what_no_memory_holds(tmp_path, capsys, words, line):
    assert main(["train", "digits_mlp", *TINY, *words, "--run-dir", str(tmp_path / "run")]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(f"^jaxtrain: {line}", last), last


def test_a_batch_that_no_memory_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_check, "_host_bytes", lambda: 1000)
    with pytest.raises(
        jt.ConfigError, match=r"^train\.global_batch_size=64: a batch takes .* and this machine has 1000 B"
    ):
        jt.run_config("digits_mlp", overrides={"train.steps": 1}, run_dir=tmp_path / "run")


def test_a_machine_that_does_not_say(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_check, "_MEMORY", tmp_path / "nothing")
    assert memory_check._host_bytes() > 1 << 30  # pyright: ignore[reportOptionalOperand]  Linux says it in two ways
