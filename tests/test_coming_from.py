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
CELLS = [(theirs, ours) for theirs, ours in re.findall(r"^\| (.+?) \| (.+) \|$", PAGE, re.MULTILINE) if ours != "here"]
GIVEN = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
KEY = re.compile(r"[a-z_]+(\.[a-z_0-9]+)+=\S.*")
ARGUMENT = re.compile(r"[a-z_]+=\S.*", re.DOTALL)
FILES = {"report.html"}


def spans(kind: str) -> list[Any]:
    """The code of each cell that is of one kind: `command`, `key`, `argument` or `python`."""
    found = []
    for theirs, ours in CELLS:
        codes = [code for code in re.findall(r"`([^`]+)`", ours) if kind_of(code) == kind]
        if codes:
            found.append(pytest.param(codes, id=f"{theirs[:40]}-{codes[0][:30]}".replace("`", "")))
    return found


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


def test_every_command_is_one_that_test_docs_parses() -> None:
    parsed = {text for page, text in test_docs.commands() if page == "coming_from.md"}
    assert {code for case in spans("command") for code in case.values[0]} <= parsed


@pytest.mark.parametrize("codes", spans("key"))
def test_keys_load(codes: list[str]) -> None:
    """Keys of one cell are given together."""
    words = [test_docs.PLACEHOLDERS.get(code, code) for code in codes]
    loaded = jt.load_config("quickstart", overrides=words)
    assert {word.partition("=")[0] for word in words} <= {
        key for key, origin in loaded.origins.items() if "command" in origin
    }


# Arguments that `fit` has and `make_train_step` has not train a few steps: a second each.
@pytest.mark.parametrize(
    "codes",
    [
        pytest.param(
            *case.values,
            id=case.id,
            marks=()
            if all(
                code.partition("=")[0] in inspect.signature(jt.make_train_step).parameters for code in case.values[0]
            )
            else pytest.mark.long,
        )
        for case in spans("argument")
    ],
)
def test_arguments_are_taken(codes: list[str], given: dict[str, Any]) -> None:
    words = {code.partition("=")[0]: eval(code.partition("=")[2], given) for code in codes}
    parts = (given["model"], jt.classification(), given["optimizer"])
    if set(words) <= set(inspect.signature(jt.make_train_step).parameters):
        jt.make_train_step(*parts, **words)
    elif words != {"resume": "must"}:  # nothing is there to resume
        steps = {} if "epochs" in words else {"steps": 4}
        jt.fit(*parts, data=(given["images"], given["labels"]), batch_size=16, run_dir="runs/x", **steps, **words)


@pytest.mark.long
def test_python_runs(given: dict[str, Any]) -> None:
    """One line after the other, as on the page: a checkpoint that one writes is read by the next."""
    for case in spans("python"):
        for code in case.values[0]:
            if "run." in code and "run" not in given:
                parts = {"model": given["model"], "task": jt.classification()}
                given["run"] = jt.open_run(next(Path("runs").glob("*/run.json")).parent, **parts)
            exec(code, given)
