"""Processes of one run that were started differently: all end with one line before anything is compiled."""

import json
from pathlib import Path

import pytest

from jaxtrain.errors import ConfigError, DataError
from jaxtrain.runtime.distributed import verdict_of

SEED = {"seed": ("1", "command line")}
OTHER = {"seed": ("2", "")}
# id: (what each process says, kind of the error, a part of its line)
SAID = {
    "alike but for the place": ([{"facts": SEED}, {"facts": {"seed": ("1", "tiny.yaml:3")}}], None, ""),
    "the third of three": (
        [{"facts": SEED}, {"facts": SEED}, {"facts": OTHER}], ConfigError,
        "the processes disagree: seed: process 0 has 1 (command line), process 2 has 2",
    ),
    "missing": ([{"facts": SEED}, {"facts": {}}], ConfigError, "process 0 has 1 (command line), process 1 has none"),
    "one failed": ([{"facts": {}}, {"failed": "no such file", "code": 3}], DataError, "process 1 cannot continue: no"),
}  # fmt: skip


@pytest.mark.parametrize(("everyone", "kind", "line"), SAID.values(), ids=SAID)
def test_one_line_for_all(everyone, kind, line):
    found = verdict_of(everyone)
    assert (None if found is None else type(found)) == kind
    assert line in str(found or "")


TINY = {
    "model": dict(kind="transformer", num_layers=1, embed_dim=16, num_heads=2, max_sequence_length=16),
    "data": dict(kind="text", tokenizer=dict(kind="byte")),
    "train": dict(steps=4, global_batch_size=8),
    "logging": dict(tensorboard=False, report=False),
}
# id: (words of process 0, words of process 1, code, lines of both)
STARTS = {
    "configs": (
        "seed=3 checkpoint.every=7 logging.every=3",
        "optimizer.learning_rate=0.01 train.steps=6 precision.policy=bf16 evaluation.every=2",
        2,
        "the processes disagree: checkpoint.every: process 0 has 7 (command line), process 1 has 1000; "
        "evaluation.every: process 0 has None, process 1 has 2 (command line); "
        "optimizer.learning_rate: process 0 has 0.001, process 1 has 0.01 (command line); "
        "precision.policy: process 0 has fp32, process 1 has bf16 (command line); "
        "seed: process 0 has 3 (command line), process 1 has 0; "
        "train.steps: process 0 has 4 (tiny.yaml:1), process 1 has 6 (command line)",
    ),
    "data of one size": ("data.path=a.txt", "data.path=b.txt", 2, "data (tokens_sha256): process 0 has "),
    "missing data": ("", "data.path=nowhere", 3, "data.path nowhere does not exist"),
}


@pytest.mark.parametrize(
    ("first", "second", "code", "line"),
    [pytest.param(*row, id=name, marks=[pytest.mark.long] * (name != "configs")) for name, row in STARTS.items()],
)
def test_both_end_before_the_first_step(start_ranks, tmp_path: Path, first, second, code, line):
    (tmp_path / "tiny.yaml").write_text(json.dumps(TINY))
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"The cat {name} sat on the mat.\n" * 500)
    command = ["-m", "jaxtrain", "train", "tiny.yaml", "--emulate", "1", "--run-dir", "run"]
    processes = start_ranks([[*command, *words.split()] for words in (first, second)], cwd=tmp_path)
    found = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [code, code], found
    for _, err in found:
        # What Gloo says as it connects the two is not theirs.
        said = [text for text in err.splitlines() if not text.startswith(("reading data", "[Gloo]"))]
        assert len(said) == 1, err
        assert said[0].startswith("jaxtrain: ")
        assert line in said[0]
    assert not (tmp_path / "run" / "run.json").exists()
