"""The law of the house: imports downwards, readable files, no private jax, light imports, documented public names.

The order of the folders and its reason are in docs/architecture.md. A change that breaks a law moves code; it does not
change the law.
"""

import ast
import fnmatch
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

import jaxtrain

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jaxtrain"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# From the ground up: a folder may import itself and what stands before it.
ORDER = (
    *("errors", "formats", "families", "config", "runtime", "layout", "precision", "remat", "ops", "optim", "models"),
    *("data", "checkpoint", "parallel", "train", "weights", "metrics", "plan", "inference", "run", "bench", "submit"),
    *("commands", "cli"),
)
MOST_LINES = 700
# Module name -> file, without the shipped configs.
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "configs" not in path.relative_to(PACKAGE).parts
}
FACES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


@pytest.fixture(scope="module")
def trees():
    """Module name -> what its file parses to."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imported(tree):
    """Modules of the package that a file imports, anywhere in it, and names that it takes from the package's face."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "jaxtrain")
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "jaxtrain"):
            assert not node.level, "imports are written in full"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES or node.module == "jaxtrain" else node.module


def floor_of(name):
    """The place of a module's room in the order; the package's own face stands above all."""
    room = name.partition(".")[2].partition(".")[0]
    return ORDER.index(room) if room in ORDER else len(ORDER)


def upward(name, tree):
    """The imports of a module that break the order."""
    if name in ("jaxtrain", "jaxtrain.__main__"):
        return []  # the face hands on names of every floor
    return [
        target for target in imported(tree) if target != "jaxtrain.__version__" and floor_of(target) > floor_of(name)
    ]


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


def test_imports_point_downwards(trees):
    assert {name: found for name, tree in trees.items() if (found := upward(name, tree))} == {}


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("def f():\n    from jaxtrain.train import step", ["jaxtrain.train.step"]),
        ("from jaxtrain import make_train_step", ["jaxtrain.make_train_step"]),
        ("import jaxtrain", ["jaxtrain"]),
        ("from jaxtrain import __version__, errors\nfrom jaxtrain.layout.mesh import make_mesh", []),
    ],
)
def test_the_order_is_noticed(text, broken):
    assert upward("jaxtrain.ops.linear", ast.parse(text)) == broken


def test_no_file_and_no_folder_imports_itself_through_others(trees):
    def folder(name):
        return name if name in FACES else name.rpartition(".")[0]

    files, folders = {}, {}
    for name, tree in trees.items():
        # The face of a package only hands names on.
        if name not in FACES:
            files[name] = set(imported(tree)) - {name}
            folders.setdefault(folder(name), set()).update({folder(target) for target in files[name]} - {folder(name)})
    folders.pop("jaxtrain")
    assert circles(files) == []
    assert circles({name: targets - {"jaxtrain"} for name, targets in folders.items()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_every_folder_is_installed_and_has_its_place():
    assert {name.split(".")[1] for name in FACES if "." in name} <= set(ORDER)
    patterns = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    for folder in {path.parent for path in MODULES.values()}:
        package = ".".join(folder.relative_to(ROOT).parts)
        assert package in FACES, f"{package} has modules but no __init__.py"
        assert any(fnmatch.fnmatchcase(package, pattern) for pattern in patterns), f"{package} is not installed"
    assert PROJECT["project"]["version"] == jaxtrain.__version__


def broken_laws(name, tree):
    """What a file does that none may."""
    found = []
    for node in ast.walk(tree):
        # A private import breaks with any release; plan/topology.py says why it needs one.
        module = node.module if isinstance(node, ast.ImportFrom) else ""
        if (module or "").startswith("jax._src") and name != "jaxtrain.plan.topology":
            found.append(f"line {node.lineno}: imports jax._src")
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = getattr(node.func.value, "id", None) if isinstance(node.func, ast.Attribute) else None
            # Newer jax makes Explicit axes by default; jaxtrain.make_mesh is our own, with the types inside.
            bare = called == "Mesh" or (called == "make_mesh" and owner == "jax")
            if bare and "axis_types" not in {word.arg for word in node.keywords}:
                found.append(f"line {node.lineno}: {called} without axis_types")
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found += [f"line {node.lineno}: no parameter {one}" for one in undocumented(node)]
    return found


def undocumented(node):
    """Names under `Args:` of a docstring that are no parameters of what it documents."""
    listed = re.search(r"^Args:\n((?:    .*\n?|\n)*)", ast.get_docstring(node) or "", re.MULTILINE)
    functions = [one for one in getattr(node, "body", ()) if isinstance(one, ast.FunctionDef)]
    if isinstance(node, ast.FunctionDef):
        function = node
    else:
        function = next((one for one in functions if one.name == "__init__"), functions[0] if functions else None)
    if listed is None or function is None:
        return
    known = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    for names in re.findall(r"^    ([A-Za-z_*][\w*, ]*): ", listed[1], re.MULTILINE):
        yield from (one for one in names.replace("*", "").replace(" ", "").split(",") if one not in known)


def test_files_are_readable_and_keep_the_laws(trees):
    scripts = {path.name: path for path in sorted((ROOT / "scripts").glob("*.py"))}
    trees = trees | {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in scripts.items()}
    found = {}
    for name, path in {**MODULES, **scripts}.items():
        lines = path.read_text(encoding="utf-8").count("\n")
        laws = broken_laws(name, trees[name])
        laws += [f"{lines} lines"] if lines > MOST_LINES else []
        laws += ["no docstring"] if lines and not ast.get_docstring(trees[name]) else []
        found |= {name: laws} if laws else {}
    assert found == {}


@pytest.mark.parametrize(
    ("text", "num_broken"),
    [
        ("from jax._src import mesh", 1),
        ("m = jax.make_mesh((8,), ('data',))", 1),
        ("m = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))", 0),
        ('def f(x):\n    """Do.\n\n    Args:\n        x: one.\n        y: other.\n    """\n', 1),
    ],
)
def test_the_laws_are_noticed(text, num_broken):
    assert len(broken_laws("jaxtrain.any", ast.parse(text))) == num_broken


def test_names_of_test_files_are_unique():
    # Without packages below tests/ pytest imports a file by its name alone, and refuses a second one.
    names = [path.name for path in ROOT.glob("tests/**/test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_what_says_that_it_needs_no_jax_imports_none(trees):
    said = [name for name, tree in trees.items() if "no jax here" in (ast.get_docstring(tree) or "").lower()]
    assert len(said) > 20
    program = "import importlib, sys\n" + "".join(
        f"importlib.import_module({name!r}); assert 'jax' not in sys.modules, {name!r}\n" for name in said
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_package_and_its_command_line_start_light():
    program = """
import sys, jaxtrain, jaxtrain.errors, jaxtrain.cli
print(sorted({"jax", "numpy", "pydantic", "yaml"} & set(sys.modules)))
import jaxtrain.config
print(sorted({"jax", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split("\n") == ["[]", "[]", ""]


def test_public_names_are_documented_where_they_are_defined():
    for public in set(jaxtrain.__all__) - {"__version__"}:
        value = getattr(jaxtrain, public)
        if isinstance(value, Mapping):
            continue  # a table, whose text stands in the reference
        # dataclass writes the signature where there is no docstring.
        assert inspect.getdoc(value), public
        assert not inspect.getdoc(value).startswith(f"{public}("), public
        assert hasattr(importlib.import_module(value.__module__), public), public
    assert set(dir(jaxtrain)) >= set(jaxtrain.__all__)
    with pytest.raises(AttributeError, match="No jaxtrain attribute trian"):
        _ = jaxtrain.trian
