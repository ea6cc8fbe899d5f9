"""The law of the house: imports point downwards, in one order of folders, lazy imports included.

The order and its reason are in docs/architecture.md. A change that breaks it moves code; it does not change the order.
"""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jaxtrain"
# From the ground up: a folder may import itself and what stands before it.
ORDER = (
    "errors",
    "published",
    "config",
    "runtime",
    "layout",
    "precision",
    "remat",
    "ops",
    "optim",
    "models",
    "interop",
    "data",
    "checkpoint",
    "parallel",
    "train",
    "inference",
    "metrics",
    "plan",
    "run",
    "bench",
    "submit",
    "commands",
    "cli",
)
AT_THE_TOP = {"__init__.py", "__main__.py", "cli.py", "errors.py"}
MOST_LINES = 700


def modules(package):
    """Module name -> file, without the shipped configs."""
    files = [path for path in package.rglob("*.py") if "configs" not in path.relative_to(package).parts]
    names = {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in files}
    return {name.removesuffix(".__init__"): path for name, path in sorted(names.items())}


# Parsing takes most of the time of these tests, which look at a file several times in a row; all trees would be 100 MB.
parse = functools.lru_cache(maxsize=1)(ast.parse)


def imported(text, known):
    """Modules of the package that a file imports, anywhere in it."""
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "jaxtrain")
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "jaxtrain"):
            assert not node.level, "imports are written in full"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module


def floor(module):
    """Where a module stands in the order; the package itself is below everything."""
    parts = module.split(".")
    return -1 if len(parts) == 1 else ORDER.index(parts[1])


def upward(name, text, known):
    """The imports of a module that break the order, and what it takes from the face of the package."""
    if name in ("jaxtrain", "jaxtrain.__main__"):
        return []
    found = [target for target in imported(text, known) if floor(target) > floor(name)]
    # The face hands on names of every floor.
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtrain":
            names = [alias.name for alias in node.names if f"jaxtrain.{alias.name}" not in known]
            found += [f"jaxtrain.{one}" for one in names if one != "__version__"]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name == "jaxtrain"]
    return found


def circles(arrows):
    """Whatever can be reached from itself."""
    found = []
    for start in arrows:
        waiting, seen = list(arrows[start]), set()
        while waiting:
            here = waiting.pop()
            if here not in seen:
                seen.add(here)
                waiting += arrows.get(here, ())
        if start in seen:
            found.append(start)
    return found


MODULES = modules(PACKAGE)
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}


@functools.cache
def imported_by(name):
    return frozenset(imported(TEXTS[name], MODULES))


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downwards(name):
    assert upward(name, TEXTS[name], MODULES) == []


def test_no_file_imports_itself_through_others():
    arrows = {name: imported_by(name) - {name} for name in TEXTS}
    faces = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert circles({name: targets for name, targets in arrows.items() if name not in faces}) == []


def test_no_folder_imports_itself_through_others():
    faces = {name for name, path in MODULES.items() if path.name == "__init__.py"}

    def folder(name):
        return name if name in faces else name.rpartition(".")[0]

    arrows = {}
    for name in TEXTS:
        # The face of a package only hands names on.
        if name not in faces and folder(name) != "jaxtrain":
            targets = {folder(target) for target in imported_by(name)} - {folder(name), "jaxtrain"}
            arrows.setdefault(folder(name), set()).update(targets)
    assert len(arrows) > 20
    assert circles(arrows) == []


@pytest.mark.parametrize(
    ("name", "text", "broken"),
    [
        ("jaxtrain.ops.linear", "from jaxtrain.train.step import TrainStep", ["jaxtrain.train.step"]),
        ("jaxtrain.ops.linear", "def f():\n    from jaxtrain.train import step", ["jaxtrain.train.step"]),
        ("jaxtrain.ops.linear", "import jaxtrain.cli", ["jaxtrain.cli"]),
        ("jaxtrain.ops.linear", "from jaxtrain import make_train_step", ["jaxtrain.make_train_step"]),
        ("jaxtrain.ops.linear", "import jaxtrain", ["jaxtrain"]),
        ("jaxtrain.ops.linear", "from jaxtrain import __version__", []),
        ("jaxtrain.ops.linear", "from jaxtrain.layout.mesh import make_mesh\nfrom jaxtrain import errors", []),
    ],
)
def test_the_law_is_noticed(name, text, broken):
    assert upward(name, text, MODULES) == broken


def test_circles_are_noticed():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_every_folder_has_its_place():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert folders <= set(ORDER)
    assert {path.name for path in PACKAGE.glob("*.py")} == AT_THE_TOP


@pytest.mark.parametrize("path", MODULES.values(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short(path):
    assert path.read_text(encoding="utf-8").count("\n") <= MOST_LINES


def test_names_of_test_files_are_unique():
    # Without packages below tests/ pytest imports a file by its name alone, and refuses a second one.
    names = [path.name for path in ROOT.glob("tests/**/test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_files_that_say_no_jax_start_none():
    said = [name for name, text in TEXTS.items() if "no jax here" in (ast.get_docstring(parse(text)) or "").lower()]
    assert len(said) > 20
    for name in said:
        names = {alias.name for node in ast.walk(parse(TEXTS[name])) if isinstance(node, ast.Import)
                 for alias in node.names}  # fmt: skip
        sources = {node.module for node in ast.walk(parse(TEXTS[name])) if isinstance(node, ast.ImportFrom)}
        assert not {one.split(".")[0] for one in [*names, *filter(None, sources)]} & {"jax", "flax", "optax"}, name
    program = "import importlib, sys\n" + "".join(
        f"importlib.import_module({name!r}); assert 'jax' not in sys.modules, {name!r}\n" for name in said
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
