"""What the docs print is of this version: commands parse, their configs and keys load, files and links are there."""

import re
import shlex
from pathlib import Path

import pytest

from jaxtrain.commands.launch import read_command
from jaxtrain.commands.parsing import find_command, parse
from jaxtrain.commands.sweep import all_trials
from jaxtrain.config import load_config

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    *sorted((ROOT / "configs").glob("*.yaml")),
]
# In a fenced or indented block (or a config's header), or in backquotes.
LINE = re.compile(r"^(?:# |    )?(jaxtrain [a-z].*?)(?:\s+#.*)?$|`(jaxtrain [a-z][^`]*)`", re.MULTILINE)
# A config that a page prints, under a first line with its name.
CONFIG = re.compile(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PLACEHOLDERS = {
    **{"CONFIG": "quickstart", "NAME": "quickstart", "RUN": "runs/x", "RUN_DIR": "runs/x", "DIR": "x"},
    # A published model that is here.
    "model.from=models/SmolLM2-135M": f"model.from={ROOT / 'tests' / 'weights' / 'published' / 'smollm2'}",
    "model.from=models/llama": f"model.from={ROOT / 'tests' / 'weights' / 'published' / 'llama'}",
    # An adapter of it.
    "model.from=HuggingFaceTB/SmolLM2-135M": f"model.from={ROOT / 'tests' / 'weights' / 'published' / 'smollm2'}",
    "finetune.adapter=adapters/llama": f"finetune.adapter={ROOT / 'tests' / 'weights' / 'adapters' / 'llama'}",
}


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block, inline in LINE.findall(page.read_text()):
            text = (block or inline).strip()
            if "COMMAND" not in text and "|" not in text.split("`")[0]:
                found.append((page.name, text))
    return found


@pytest.mark.parametrize("page", sorted({page for page, _ in commands()}))
def test_printed_commands_are_valid(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, config in CONFIG.findall(next(path for path in PAGES if path.name == page).read_text()):
        (tmp_path / name).write_text(config)
    for text in {text for where, text in commands() if where == page}:
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(text)[1:]]
        name, rest = find_command(words)
        parsed = parse(name, rest)
        if name == "launch":
            read_command(parsed.command)
        if getattr(parsed, "config", None) is not None:
            # The keys after a run, which is not here, are those of any config.
            config = "quickstart" if parsed.config.startswith("runs/") else parsed.config
            overrides = parsed.overrides
            if name == "sweep":
                overrides = all_trials(overrides)[0]
            load_config(config, overrides=overrides, weights=False)


def test_every_command_is_in_the_docs() -> None:
    from jaxtrain.commands.table import COMMANDS

    printed = " ".join(text for _, text in commands())
    assert [name for name in COMMANDS if f"jaxtrain {name}" not in printed] == []


# What may differ between two lines of a page that share a run directory: where a run goes on, and how.
OF_THE_SAME_RUN = re.compile(r"--resume|must|never|auto|checkpoint\.\S+|train\.steps=\d+")


def test_lines_of_a_page_that_train_otherwise_have_a_run_directory_each() -> None:
    """Else the second one, run after the first, goes on from it, is refused, or trains nothing."""
    for page in PAGES:
        directories: dict[str, list[str]] = {}
        for line, _ in LINE.findall(page.read_text()):
            words = shlex.split(line)
            words = words[words.index("--") + 1 :] if "--" in words else words[1:]
            if words[:1] != ["train"] or len(words) == 1:
                continue
            place = words.index("--run-dir") if "--run-dir" in words else None
            directory = words[place + 1] if place is not None else f"runs/{Path(words[1]).stem}"
            trained = [word for word in words if not OF_THE_SAME_RUN.fullmatch(word)]
            assert directories.setdefault(directory, trained) == trained, f"{page.name}: {directory}: {line}"


def test_named_files_are_there() -> None:
    """Files of code and folders of tests that pages name in backquotes, as from the root or from inside the package."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    pattern = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|yaml|txtpb)|tests/[a-z_/]*)`")
    named = {(page.name, name) for page in pages for name in pattern.findall(page.read_text())}
    assert len(named) > 100
    missing = [
        (page, name) for page, name in named if not (ROOT / name).exists() and not (ROOT / "jaxtrain" / name).exists()
    ]
    assert not missing


def anchors(page: Path) -> set[str]:
    """The names of the headings of a page, as the repository's view and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[tuple[str, str]]:
    """Links of a page that lead nowhere; blocks of code and what is in backquotes hold none."""
    text = re.sub(r"^(`{3,})[^\n]*\n.*?^\1\s*$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        if link.startswith(("https://", "http://")):
            continue
        if not target.is_file() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append((page.name, link))
    return found


def test_links_lead_somewhere_in_the_repository_as_on_the_site(tmp_path: Path) -> None:
    assert [found for page in (ROOT / "docs").rglob("*.md") for found in broken_links(page)] == []
    page = tmp_path / "page.md"
    page.write_text("# One\n\n[a](page.md#one) [b](page.md#two) [c](none.md)\n\n```\n[d](none.md)\n```\n")
    assert broken_links(page) == [("page.md", "page.md#two"), ("page.md", "none.md")]


def test_every_page_is_in_the_navigation() -> None:
    docs = ROOT / "docs"
    linked = {docs / "index.md"}
    # The site makes its navigation of the links of these pages (docs/conf.py).
    for name in ("index.md", "gallery/README.md", "reference/index.md"):
        page = docs / name
        assert page in linked, f"{name} comes after the page that links to it"
        found = re.findall(r"\]\(([\w/]+\.(?:md|ipynb))(?:#[\w-]*)?\)", page.read_text(encoding="utf-8"))
        linked |= {page.parent / one for one in found}
    missing = sorted(str(page.relative_to(docs)) for page in {*docs.rglob("*.md"), *docs.rglob("*.ipynb")} - linked)
    assert not missing, f"no index page links to {missing}: add a line to docs/index.md"
