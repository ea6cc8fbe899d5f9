"""The reference pages are what the docstrings say, every public name has an example, and every example runs."""

import doctest
import importlib.util
import sys
from pathlib import Path

import pytest

import jaxtrain as jt

ROOT = Path(__file__).resolve().parent.parent


def load_script():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "scripts" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_reference"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


REFERENCE = load_script()
ENTRIES = {entry.name: entry for entry in REFERENCE.entries()}
# Examples of several seconds each: a run with its files, or a transformer that is compiled.
LONG = {"Engine", "Result", "fit", "generate_text", "open_model", "open_run", "quantize", "run_config"}
LONG |= {"adapt", "from_models", "load_adapter", "merge_adapters"}


@pytest.fixture(scope="module")
def given():
    """The lines that the index page prints above all examples."""
    names: dict[str, object] = {}
    exec(compile(REFERENCE.PRELUDE, "the lines that examples take as given", "exec"), names)
    return names


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in ENTRIES]
)
def test_example_runs_as_printed(name, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = ENTRIES[name].example
    assert ">>> " in text, f"the docstring of {name} needs an example: a section 'Example:' with lines '>>> ...'"
    names = dict(given)
    if "state" in text:
        names["state"] = given["step"].init(0)  # each example may donate it
    test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    failures: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=failures.append)
    assert not failures, "".join(failures)


def test_every_public_name_is_in_the_reference():
    assert set(ENTRIES) == set(jt.__all__) - {"__version__"}
    index = REFERENCE.pages()["index.md"]
    assert [name for name in ENTRIES if f"[{name}](" not in index] == []


def test_the_pages_are_those_of_the_docstrings():
    written = {path.name: path.read_text(encoding="utf-8") for path in REFERENCE.FOLDER.glob("*.md")}
    made = dict(REFERENCE.pages())
    different = sorted(name for name in {*written, *made} if written.get(name) != made.get(name))
    assert not different, f"docs/reference/ is not up to date ({different}): run python scripts/make_reference.py"
