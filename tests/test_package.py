"""The package as a whole: what is installed, how large files are, what nothing may do."""

import ast
import fnmatch
import importlib
import inspect
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

import jaxtrain

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "jaxtrain").rglob("*.py"))
PROGRAMS = [*FILES, *sorted((ROOT / "scripts").glob("*.py"))]


def name(path):
    return str(path.relative_to(ROOT))


def test_every_folder_of_code_is_a_package_that_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = (
        settings["packages"]["find"]["include"] if isinstance(settings["packages"], dict) else settings["packages"]
    )
    folders = {path.parent for path in FILES}
    assert len(folders) > 8
    for folder in folders:
        assert (folder / "__init__.py").is_file(), f"{name(folder)} has modules but no __init__.py"
        package = name(folder).replace("/", ".")
        assert any(fnmatch.fnmatchcase(package, pattern) for pattern in patterns), f"{package} is not installed"


@pytest.mark.parametrize("path", PROGRAMS, ids=name)
def test_files_stay_readable(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 600
    if path.name != "__init__.py" or text:
        assert ast.get_docstring(ast.parse(text)), "a file says in its docstring what it is for"


def calls(tree):
    """(called name, keywords, line) of every call in a syntax tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            yield called, getattr(owner, "id", None), {word.arg for word in node.keywords}, node.lineno


def broken_laws(path, text):
    """What a file does that none may."""
    found = []
    # A private import breaks with any release; plan/compilers/topology.py says why it needs one.
    if re.search(r"\bjax\._src\b", text) and path != "jaxtrain/plan/compilers/topology.py":
        found.append("imports jax._src")
    for called, owner, keywords, line in calls(ast.parse(text)):
        # Newer jax makes Explicit axes by default; jaxtrain.make_mesh is our own, with the types inside.
        bare = called == "Mesh" or (called == "make_mesh" and owner == "jax")
        if bare and "axis_types" not in keywords:
            found.append(f"line {line}: {called} without axis_types")
    return found


@pytest.mark.parametrize("path", PROGRAMS, ids=name)
def test_laws(path):
    assert broken_laws(name(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "num_broken"),
    [
        ("from jax._src import mesh", 1),
        ("m = Mesh(devices, ('data',))", 1),
        ("m = jax.make_mesh((8,), ('data',))", 1),
        ("m = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))", 0),
        ("m = make_mesh(data=8)", 0),
        ("x: Mesh", 0),
    ],
)
def test_the_laws_are_noticed(text, num_broken):
    assert len(broken_laws("jaxtrain/any.py", text)) == num_broken


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["jaxtrain", "jaxtrain.config", "jaxtrain.errors", "jaxtrain.cli"])
def test_light_imports(module):
    assert run(f"import sys, {module}; print('jax' in sys.modules, 'numpy' in sys.modules)") == "False False"


def test_the_command_line_answers_help_without_the_schema():
    program = "import sys, jaxtrain.cli; print('pydantic' in sys.modules, 'yaml' in sys.modules)"
    assert run(program) == "False False"


# Public names that are tables. Their docstring is the text after them, which Python itself does not keep.
TABLES = {"DEFAULT_RULES": "layout/rules.py"}


@pytest.mark.parametrize("public", TABLES)
def test_public_tables_have_a_docstring(public):
    assert isinstance(getattr(jaxtrain, public), Mapping)
    body = ast.parse((ROOT / "jaxtrain" / TABLES[public]).read_text(encoding="utf-8")).body
    after = [
        text
        for node, text in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == public
    ]
    assert len(after) == 1
    assert isinstance(after[0], ast.Expr)
    assert isinstance(ast.literal_eval(after[0].value), str)


@pytest.mark.parametrize("public", [name for name in jaxtrain.__all__ if name not in ("__version__", *TABLES)])
def test_public_names(public):
    value = getattr(jaxtrain, public)
    doc = inspect.getdoc(value)
    assert doc
    # dataclass writes the signature where there is no docstring; a mapping or alias would show its type's.
    assert not doc.startswith(f"{public}(")
    assert value.__name__ == public
    assert hasattr(importlib.import_module(value.__module__), public)


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'jaxtrain' has no attribute 'trian'"):
        _ = jaxtrain.trian
    assert set(dir(jaxtrain)) >= set(jaxtrain.__all__)


def test_the_version_is_that_of_the_project():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"] == (
        jaxtrain.__version__
    )


def undocumented_names(tree):
    """Names under `Args:` of a docstring that are no parameters of what it documents."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        listed = re.search(r"^Args:\n((?:    .*\n?|\n)*)", ast.get_docstring(node) or "", re.MULTILINE)
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        functions = [one for one in inside if isinstance(one, ast.FunctionDef)]
        function = next((one for one in functions if one.name == "__init__"), functions[0] if functions else None)
        if listed is None or function is None:
            continue
        arguments = function.args
        known = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        known |= {one.arg for one in (arguments.vararg, arguments.kwarg) if one is not None}
        for names in re.findall(r"^    ([A-Za-z_*][\w*, ]*): ", listed[1], re.MULTILINE):
            yield from (one for one in names.replace("*", "").replace(" ", "").split(",") if one not in known)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_docstrings_name_parameters_that_exist(path):
    assert list(undocumented_names(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_a_wrong_docstring_is_noticed():
    text = 'def f(x):\n    """Do.\n\n    Args:\n        x: one.\n        y: other.\n    """\n'
    assert list(undocumented_names(ast.parse(text))) == ["y"]
