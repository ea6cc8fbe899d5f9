"""What docs/coming_from.md has people write is right: Python runs, keys load; test_docs.py parses its commands."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import test_docs

import jaxtrain as jt

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "coming_from.md").read_text()
# The cell on the right of each row of a table.
CELLS = [ours for _, ours in re.findall(r"^\| (.+?) \| (.+) \|$", PAGE, re.MULTILINE) if ours != "here"]
GIVEN = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
KEY = re.compile(r"[a-z_]+(\.[a-z_0-9]+)+=\S.*")
ARGUMENT = re.compile(r"[a-z_]+=\S.*", re.DOTALL)
FILES = {"report.html"}


def spans(kind: str) -> list[list[str]]:
    """The code of each cell that is of one kind: `command`, `key`, `argument` or `python`."""
    cells = [[code for code in re.findall(r"`([^`]+)`", ours) if kind_of(code) == kind] for ours in CELLS]
    return [codes for codes in cells if codes]


def kind_of(code: str) -> str:
    if code.startswith("jaxtrain "):
        return "command"
    if code in FILES:
        return "file"
    return "key" if KEY.fullmatch(code) else "argument" if ARGUMENT.fullmatch(code) else "python"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """The names that the page takes as given."""
    names: dict[str, Any] = {}
    exec(compile(GIVEN, "coming_from.md", "exec"), names)
    return names


@pytest.fixture
def given(names, tmp_path, monkeypatch) -> dict[str, Any]:
    """Them, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    return names


def test_keys_load() -> None:
    """Keys of one cell are given together."""
    for codes in spans("key"):
        words = [test_docs.PLACEHOLDERS.get(code, code) for code in codes]
        loaded = jt.load_config("quickstart", overrides=words)
        given = {key for key, origin in loaded.origins.items() if "command" in origin}
        assert {word.partition("=")[0] for word in words} <= given


def test_arguments_of_a_step_are_taken(given: dict[str, Any]) -> None:
    parameters = inspect.signature(jt.make_train_step).parameters
    for codes in spans("argument"):
        words = {code.partition("=")[0]: eval(code.partition("=")[2], given) for code in codes}
        if set(words) <= set(parameters):
            jt.make_train_step(given["model"], jt.classification(), given["optimizer"], **words)


@pytest.mark.long
def test_arguments_of_a_run_are_taken(given: dict[str, Any]) -> None:
    """They train a few steps: a second each."""
    parameters = inspect.signature(jt.make_train_step).parameters
    for number, codes in enumerate(spans("argument")):
        words = {code.partition("=")[0]: eval(code.partition("=")[2], given) for code in codes}
        if not set(words) <= set(parameters) and words != {"resume": "must"}:  # nothing is there to resume
            steps = {} if "epochs" in words else {"steps": 4}
            data = (given["images"], given["labels"])
            words |= {"batch_size": 16, "run_dir": f"runs/{number}", **steps}
            jt.fit(given["model"], jt.classification(), given["optimizer"], data=data, **words)


@pytest.mark.long
def test_python_runs(given: dict[str, Any]) -> None:
    """One line after the other, as on the page: a checkpoint that one writes is read by the next."""
    for codes in spans("python"):
        for code in codes:
            if "run." in code and "run" not in given:
                parts = {"model": given["model"], "task": jt.classification()}
                given["run"] = jt.open_run(next(Path("runs").glob("*/run.json")).parent, **parts)
            exec(code, given)
