"""Every mistake on the command line is one line on standard error with its exit code, and nothing else."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from jaxtrain.cli import main
from jaxtrain.commands.table import COMMANDS

PLAN = "plan quickstart --analytic --on"
LLAMA = Path(__file__).resolve().parents[1] / "weights" / "published" / "llama"
# id: (words, exit code, pattern of the line)
USAGE = {
    "unknown command": ("trian", 2, r"no command 'trian', did you mean 'train'\?"),
    "group alone": ("data", 2, r"jaxtrain data: its commands are data prepare, data show; see"),
    "missing config": (
        "train",
        2,
        r"jaxtrain train: the following arguments are required: CONFIG; see 'jaxtrain train --help'",
    ),
    "misspelt option": ("train quickstart --resum=must", 2, r"no option --resum, did you mean --resume\?"),
    "key of another trainer as an option": ("train quickstart --lr 1", 2, r"unexpected argument '--lr'"),
    "no devices": ("train quickstart --emulate 0", 2, r"--emulate: '0' is not a whole number from 1 to"),
    "unknown config": ("train quikstart", 2, r"no config 'quikstart'.*did you mean 'quickstart'\?"),
    "unknown key": ("train quickstart train.step=5", 2, r"unknown key 'train\.step' \(command line\); did you mean"),
    "wrong type": ("train quickstart train.steps=many", 2, r"train\.steps is 'many' \(command line\); it takes int"),
    "missing data": ("train quickstart data.path=/no/such.txt", 3, r"data\.path /no/such\.txt does not exist"),
    "resume without a checkpoint": (
        "train quickstart --resume must --run-dir new",
        4,
        r"no checkpoint in \S*/new/checkpoints",
    ),
    "evaluating nothing": ("eval nowhere", 2, r"nowhere is not a run: it has no run\.json"),
    "a published folder": ("eval published", 2, r"published is not a run: .*jaxtrain import published -o RUN_DIR"),
    "a foreign run.json": ("eval foreign", 2, r"run\.json holds no config"),
    "a run without checkpoints": ("eval fresh", 4, r"no checkpoint in .*fresh/checkpoints"),
    "an address as run directory": ("train quickstart --run-dir gs://b/run", 2, r"gs://b/run is not a path on this"),
    "rows that are no tokens": ("data show digits_mlp", 3, r"rows can be shown only if their targets are"),
    "a folder without a tokenizer": (f"sample {LLAMA} -p a", 2, r"has no tokenizer\.json"),
    "serving everybody": ("serve folder --port 0 --host 0.0.0.0", 2, r"can be reached from other machines"),
    "serving with an empty key": ("serve folder --port 0 --api-key-file file", 2, r"holds no valid key"),
    "launching nothing": ("launch --processes 2", 2, r"command to run is missing after '--', as in 'jaxtrain launch"),
    "launching a command of one process": (
        "launch --processes 2 -- data prepare quickstart -o tokens",
        2,
        r"'data prepare' works in one process; run it without launch",
    ),
    "launching a script": ("launch --processes 2 -- ./my.py", 2, r"my\.py' is not a program.*write: python .*my"),
    "sweeping a wrong key": ("sweep quickstart train.stepps=1,2", 2, r"train\.stepps"),
    "sweeping nothing": ("sweep quickstart", 2, r"arguments are required: key=value;"),
    "planning nothing": ("plan --analytic", 2, r"CONFIG is missing; 'jaxtrain plan --list' lists the hardware"),
    "port that there is not": ("serve runs/none --port 65536", 2, r"'65536' is not a whole number from 0 to 65535"),
    "unknown hardware": (f"{PLAN} h101x8", 2, r"no 'h101x8' in the catalogue: did you mean h100 .*--hardware"),
    "classes beyond the model's": (
        "plan digits_resnet --analytic --on h100 model.num_classes=5",
        2,
        r"the model has 5 outputs but the data 10 classes",
    ),
    "key of the hardware file": (
        f"{PLAN} h100x8 --hardware hardware.yaml",
        2,
        r"hardware\.yaml:1: h100: no key",
    ),
    "a run directory that is a file": (
        "train quickstart --run-dir file",
        2,
        r"run directory file cannot be used: File exists",
    ),
}


def test_help_lists_the_commands(cli):
    for words in ([], ["--help"], ["help"]):
        answer = cli(*words)
        assert (answer.code, answer.err) == (0, "")
        assert all(f"  {name} " in answer.out for name in COMMANDS)


def one_line(err: str, pattern: str) -> None:
    lines = [line for line in err.splitlines() if not re.match(r"[a-z ]+ …( |$)", line)]
    assert len(lines) == 1, err
    assert lines[0].startswith("jaxtrain")
    assert re.search(pattern, lines[0]), lines[0]
    assert "Traceback" not in err


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A working directory with paths that are no runs, and a run that has not saved yet."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"file": "", "my.py": "print('hello')", "hardware.yaml": "h100: {colour: red}\n"}.items():
        (tmp_path / name).write_text(text)
    fresh = '{"config": {}, "data": {"input_shape": [8], "vocab_size": 256, "reading": {}}}'
    for name, content in (("folder", None), ("foreign", "[1]"), ("fresh", fresh)):
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "run.json").write_text(content)
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text("{}")


@pytest.mark.parametrize(("words", "code", "pattern"), USAGE.values(), ids=USAGE.keys())
def test_mistake_is_one_line(cli, places, words, code, pattern):
    answer = cli(*words.split())
    assert (answer.code, answer.out) == (code, "")
    one_line(answer.err, pattern)


# id: (words after the run, exit code, pattern); the run is a text run with checkpoints of steps 2 and 4
RUN_MISTAKES = {
    "step that is not there": ("eval {text} --step 3", 4, r"no checkpoint of step 3 in .*: it holds 2, 4"),
    "key that belongs to training": ("eval {text} model.num_layers=3", 2, r"model\.num_layers=3 cannot change"),
    "text of an image model": ("sample {image} -p a", 2, r"images .* generates no text"),
    "top-p above one": ("sample {text} -p a --top-p 2", 2, r"top_p is 2\.0"),
    "a page in no folder": ("report {text} -o no/page.html", 2, r"No such file or directory; give a file in a folder"),
    "more tokens than positions": ("sample {text} -p abcdef -n 60", 2, r"exceed the model's 32 positions.*at most 26"),
}


@pytest.mark.parametrize(("words", "code", "pattern"), RUN_MISTAKES.values(), ids=RUN_MISTAKES.keys())
def test_mistake_with_a_run_is_one_line(cli, text_run, image_run, words, code, pattern):
    answer = cli(*words.format(text=text_run, image=image_run).split())
    assert (answer.code, answer.out) == (code, "")
    one_line(answer.err, pattern)


def test_checkpoint_of_another_model_is_refused(cli, text_run, tmp_path):
    other = shutil.copytree(text_run, tmp_path / "other")
    info = json.loads((other / "run.json").read_text())
    info["config"]["model"]["mlp_dim"] = 128
    (other / "run.json").write_text(json.dumps(info))
    answer = cli("sample", str(other), "-p", "a")
    assert (answer.code, answer.out) == (4, "")
    one_line(answer.err, r"is of another model: .*kernel is float32")


class XlaRuntimeError(RuntimeError):
    """Named as jax's."""


# id: (what the command raises, exit code, pattern of the line or "" for silence)
CRASHES = {
    "ours": (ValueError("first\nsecond"), 1, r"internal error: ValueError: first; run again with --debug"),
    "device memory": (
        XlaRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        2,
        r"train\.global_batch_size.*remat\.policy",
    ),
    "host memory": (MemoryError(), 2, r"out of memory; lower train\.global_batch_size"),
    "disk": (OSError(28, "No space left on device", "/x/y"), 1, r"cannot use /x/y: No space left on device"),
    "Ctrl-C": (KeyboardInterrupt(), 130, ""),
}


@pytest.mark.parametrize(("error", "code", "pattern"), CRASHES.values(), ids=CRASHES.keys())
def test_crash_is_one_line(cli, monkeypatch, error, code, pattern):
    monkeypatch.setattr("jaxtrain.commands.doctor.run", Mock(side_effect=error))
    answer = cli("doctor")
    assert (answer.code, answer.out) == (code, "")
    if pattern:
        one_line(answer.err, pattern)
    else:
        assert answer.err == ""


def test_debug_adds_the_traceback(cli, monkeypatch):
    monkeypatch.setattr("jaxtrain.commands.doctor.run", Mock(side_effect=ValueError("wrong")))
    answer = cli("--debug", "doctor")
    assert answer.code == 1
    assert "Traceback" in answer.err
    assert "internal error: ValueError: wrong" in answer.err.splitlines()[-1]


def test_options_stand_anywhere_and_overrides_take_dashes(monkeypatch):
    seen = []
    monkeypatch.setattr("jaxtrain.commands.train.run", lambda arguments: seen.append(vars(arguments)) or 0)
    same = (
        "--run-dir r quickstart train.steps=5 seed=3",
        "quickstart --train.steps=5 --seed=3 --run-dir=r",
        "quickstart train.steps=5 --run-dir r --seed=3",
    )
    for words in same:
        assert main(["train", *words.split()]) == 0
    expected = dict(
        config="quickstart",
        overrides=["train.steps=5", "seed=3"],
        run_dir="r",
        resume="auto",
        restarts=0,
        emulate=None,
        command=[],
    )
    assert seen == [expected] * len(same)
