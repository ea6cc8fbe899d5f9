"""Write docs/reference/ from docstrings: an index and the public names by group, and the keys of a config. No jax here.

python scripts/make_reference.py

`tests/test_reference.py` runs every example, and fails where the committed pages differ from what this script writes.
"""

import argparse
import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from jaxtrain.config.errors import inner_members, members, walk
from jaxtrain.config.load import value_text
from jaxtrain.config.schema import Config

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"

# Beginning of the module and name -> the page that describes it; the first row that fits.
GROUPS = (
    ("jaxtrain.errors", "errors"),
    ("jaxtrain.data", "data"),
    ("jaxtrain.models.task", "tasks"),
    ("jaxtrain.models.preferences", "tasks"),
    ("jaxtrain.ops", "tasks"),
    ("jaxtrain.models.shard", "layout"),
    ("jaxtrain.models", "models"),
    ("jaxtrain.inference.open", "runs"),
    ("jaxtrain.inference", "models"),
    ("jaxtrain.config.schema.Remat", "models"),
    ("jaxtrain.optim", "optimizers"),
    ("jaxtrain.precision", "train"),
    ("jaxtrain.train.build.shard_model", "layout"),
    ("jaxtrain.config.schema.Parallelism", "layout"),
    ("jaxtrain.config.schema.SpikeRule", "train"),
    ("jaxtrain.weights.load", "train"),
    ("jaxtrain.train", "train"),
    ("jaxtrain.layout", "layout"),
    ("jaxtrain.runtime", "layout"),
    ("jaxtrain", "runs"),
)
TITLES = {
    "train": "The train step",
    "models": "Models",
    "tasks": "Tasks and losses",
    "data": "Data",
    "optimizers": "Optimizers",
    "runs": "Runs, checkpoints and configs",
    "layout": "Devices and layout",
    "errors": "Errors",
}
# What the examples take as given; the tests run it before each of them.
PRELUDE = """\
import jax, jax.numpy as jnp, numpy as np, optax, jaxtrain as jt
from flax import linen, nnx

model = jt.from_nnx(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
rows = jt.ArrayRows({"inputs": np.ones((8, 4), np.float32), "targets": np.arange(8) % 3})
batches = jt.Batches(rows, 8, seed=0, shuffle=True)
step = jt.make_train_step(model, jt.classification(), optax.adamw(1e-3))
state = step.init(0)

small = {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 8}
text_model = jt.build_model(small, input_shape=(8,), vocab_size=256)
"""


@dataclass(frozen=True)
class Entry:
    """A public name as its source describes it.

    Attributes:
        name: as in `jaxtrain.__all__`.
        module: where it is defined.
        node: its definition.
        doc: its docstring.
    """

    name: str
    module: str
    node: ast.FunctionDef | ast.ClassDef | ast.AnnAssign
    doc: str

    @property
    def group(self) -> str:
        """The page that describes it."""
        return next(group for begin, group in GROUPS if f"{self.module}.{self.name}".startswith(begin))

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring as one line."""
        return " ".join(self.doc.split("\n\n")[0].split())

    @property
    def example(self) -> str:
        """The section Example of the docstring, without its title; empty where there is none."""
        found = re.search(r"^Example:\n((?: {4}.*\n?|\n)+)", self.doc, re.MULTILINE)
        return "" if found is None else "\n".join(line[4:] for line in found[1].rstrip().split("\n"))


def source_of(module: str) -> Path:
    """The file of a module."""
    path = ROOT / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def parsed(module: str) -> ast.Module:
    """The syntax tree of a module; many names are looked up in the same few."""
    return ast.parse(source_of(module).read_text(encoding="utf-8"))


def find(name: str, module: str) -> Entry:
    """The definition of a name, in the module or where the module takes it from."""
    body = parsed(module)
    for index, node in enumerate(body.body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return Entry(name, module, node, ast.get_docstring(node) or "")
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            # A table is documented by the text after it.
            after = body.body[index + 1]
            assert isinstance(after, ast.Expr), f"{module}.{name} has no text after it"
            return Entry(name, module, node, ast.literal_eval(after.value).strip())
    for node in ast.walk(body):
        if isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name for one in node.names):
            return find(name, node.module or "")
    raise LookupError(f"{module} does not define {name}")


def entries() -> list[Entry]:
    """All public names, in the order of the index."""
    stub = ast.parse((ROOT / "jaxtrain" / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    public = [find(node.names[0].name, f"jaxtrain.{node.module}") for node in imports]
    return sorted(public, key=lambda entry: entry.name.lower())


def signature(node: ast.FunctionDef, name: str, *, method: bool) -> str:
    """A call as it is written in Python, on one line or, where it is long, with one argument a line."""
    arguments = node.args
    words, plain = [], [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in list(zip(plain, defaults, strict=True))[1 if method else 0 :]:
        words.append(_argument(argument, default))
    if arguments.vararg is not None:
        words.append(f"*{_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        words.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        words.append(_argument(argument, default))
    if arguments.kwarg is not None:
        words.append(f"**{_argument(arguments.kwarg, None)}")
    gives = f" -> {_text(node.returns)}" if node.returns is not None and name != node.name.strip("_") else ""
    line = f"{name}({', '.join(words)}){gives}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){gives}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = "" if argument.annotation is None else f": {_text(argument.annotation)}"
    return argument.arg + kind + ("" if default is None else f"{' = ' if kind else '='}{_text(default)}")


def _text(node: ast.expr | None) -> str:
    """Code as text; names of types that are written as text lose their quotes."""
    assert node is not None
    if isinstance(node, ast.Constant) and re.fullmatch(r"[A-Z][\w.| \[\]]*", str(node.value)):
        return str(node.value)
    return ast.unparse(node)


def class_signature(node: ast.ClassDef) -> str:
    """How a class is made: its `__init__`, or the fields of a dataclass."""
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            if one.args.kwarg is not None:
                return f"{node.name}(**{one.args.kwarg.arg})"
            return signature(one, node.name, method=True).removesuffix(" -> None")
    fields = [
        one for one in node.body if isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_")
    ]
    words = []
    for field in fields:
        words.append(f"{ast.unparse(field.target)}: {_text(field.annotation)}{_default(field.value)}")
    line = f"{node.name}({', '.join(words)})"
    return line if len(line) <= 100 else f"{node.name}(\n" + "".join(f"    {word},\n" for word in words) + ")"


def _default(value: ast.expr | None) -> str:
    """The default of a field as ` = value`; of `field(...)` what it gives; empty where a value is needed."""
    if value is None:
        return ""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        words = {word.arg: word.value for word in value.keywords}
        if "default" in words:
            return f" = {ast.unparse(words['default'])}"
        if "default_factory" not in words:
            return ""
        return f" = { {'dict': '{}', 'list': '[]'}.get(ast.unparse(words['default_factory']), '...') }"
    return f" = {ast.unparse(value)}"


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """The public methods and properties of a class that have a docstring."""
    found = [one for one in node.body if isinstance(one, ast.FunctionDef) and ast.get_docstring(one)]
    return [one for one in found if one.name == "__call__" or not one.name.startswith("_")]


def described(doc: str) -> str:
    """A Google docstring as Markdown: sections as bold titles, entries as lists, examples as code."""
    parts: list[str] = []
    section, block = "", []

    def flush() -> None:
        text = "\n".join(block).strip("\n")
        if section == "Example" and text:
            parts.append(f"**Example**\n\n```pycon\n{_dedented(text)}\n```")
        elif section and text:
            parts.append(f"**{section}**\n\n{_list(_dedented(text))}")
        elif text:
            parts.append(text)

    for line in doc.split("\n"):
        title = re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields|Example):", line)
        if title is not None:
            flush()
            section, block = title[1], []
        elif section and line and not line.startswith(" "):
            flush()
            section, block = "", [line]
        else:
            block.append(line)
    flush()
    return "\n\n".join(parts)


def _dedented(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.split("\n"))


def _list(text: str) -> str:
    """Entries `name: text` as a list; text without a name as it is."""
    lines = []
    for line in text.split("\n"):
        found = re.match(r"([A-Za-z_*][\w*., ]*): (.*)", line)
        lines.append(f"- `{found[1]}`: {found[2]}" if found is not None else line.replace("    ", "  ", 1))
    return "\n".join(lines)


def section(entry: Entry) -> str:
    """One public name in Markdown."""
    node = entry.node
    if isinstance(node, ast.FunctionDef):
        call = signature(node, entry.name, method=False)
        if node.returns is not None and " -> " not in call.rsplit(")", 1)[-1]:
            call += f" -> {_text(node.returns)}"
    elif isinstance(node, ast.ClassDef):
        is_model = any(isinstance(one, ast.FunctionDef) and one.args.kwarg for one in node.body)
        call = f"{entry.name}(...)" if is_model else class_signature(node)
    else:
        call = f"{entry.name}: {_text(node.annotation)}"
    file = source_of(entry.module).relative_to(ROOT)
    text = [
        f"## {entry.name}",
        f"`{file}`",
        f"```python\n{call}\n```".replace("```python", "```py"),
        described(entry.doc),
    ]
    if isinstance(node, ast.ClassDef):
        for one in methods(node):
            is_property = any(ast.unparse(mark) == "property" for mark in one.decorator_list)
            name = f"{entry.name}.{one.name}" if one.name != "__call__" else entry.name.lower()
            shown = name if is_property else signature(one, name, method=True)
            text += [f"### {name if one.name != '__call__' else f'{entry.name}.__call__'}", f"```py\n{shown}\n```"]
            text.append(described(ast.get_docstring(one) or ""))
    return "\n\n".join(text)


def config_sections(group: type[BaseModel], path: str, kind: str, seen: set[type[BaseModel]]) -> Iterator[str]:
    """A group of settings as a table in Markdown, then each group inside it that is not among those seen."""
    seen.add(group)
    prefix = f"{path}." if path else ""
    title = "Keys outside the groups" if not path else path + (f".kind={kind}" if kind else "")
    lines = [f"##{'#' * path.count('.')} {title}", ""]
    if path:
        lines += [_cell((group.__doc__ or "").partition("\n\n")[0]), ""]
    lines += ["| key | meaning | takes | default |", "|---|---|---|---|"]
    for key in walk(group, {}, prefix):
        # The title says the kind, and the groups inside follow.
        if (kind and key.path == f"{prefix}kind") or "." in key.path.removeprefix(prefix):
            continue
        default = key.default if key.default == "(required)" else value_text(key.default)
        lines.append(f"| `{key.path}` | {_cell(key.doc)} | {_cell(key.type)} | {_cell(default)} |")
    yield "\n".join(lines)
    for name, field in group.model_fields.items():
        for inner_kind, inner in (members(field.annotation) | inner_members(field.annotation)).items():
            if inner not in seen:
                yield from config_sections(inner, f"{prefix}{name}", inner_kind, seen)


def _cell(text: str) -> str:
    """Plain text in Markdown, with links to the pages that it names."""
    text = re.sub(r"([|*<\[\]])", r"\\\1", " ".join(text.split())).replace(" \\| ", ", ")
    return re.sub(r"docs/(\w+)\.md", r"[\1](../\1.md)", text)


def pages() -> Mapping[str, str]:
    """File name -> content of every page."""
    found = entries()
    index = [
        "# Reference",
        "All public names of `jaxtrain`, one line each. These pages are written by `python scripts/make_reference.py` "
        "from the docstrings; each example is run by `tests/test_reference.py`.",
        "The examples take these lines as given:",
        f"```py\n{PRELUDE}```",
    ]
    written = {}
    for group, title in TITLES.items():
        own = [entry for entry in found if entry.group == group]
        table = [f"| [{one.name}]({group}.md#{one.name.lower()}) | {one.summary.replace('|', '/')} |" for one in own]
        index.append(f"## {title}\n\n| name | what it is |\n|---|---|\n" + "\n".join(table))
        written[f"{group}.md"] = "\n\n".join([f"# {title}", *map(section, own)]) + "\n"
    keys = [
        "# Config keys",
        "The keys of a config file, and of `key=value` on the command line. A group with several kinds has a table for "
        "each kind. `jaxtrain config NAME` prints the keys of one config with their values.",
    ]
    written["config.md"] = "\n\n".join([*keys, *config_sections(Config, "", "", set())]) + "\n"
    written["index.md"] = "\n\n".join(index) + "\n"
    return written


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    sys.stdout.write(
        f"{len(entries())} names and the keys of a config on {len(made)} pages in {FOLDER.relative_to(ROOT)}\n"
    )


if __name__ == "__main__":
    # Whatever else is asked for, it must not write.
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
