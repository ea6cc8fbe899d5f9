"""Pages of docs/ lead to one another in the repository as they do on the site, and each is in the navigation."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# The site makes its navigation of the links of these pages (docs/conf.py).
INDEXES = ("index.md", "gallery/README.md", "reference/index.md")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    """The text of a page without its blocks of code and what is in backquotes."""
    text = re.sub(r"^(`{3,})[^\n]*\n.*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """The names of the headings of a page, as the repository's view and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        if link.startswith(("https://", "http://")):
            continue
        if not target.is_file() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n\n[a](page.md#one) [b](page.md#two) [c](none.md)\n\n```\n[d](none.md)\n```\n")
    assert broken(page) == ["page.md#two", "none.md"]


def test_every_page_is_in_the_navigation() -> None:
    linked = {DOCS / name for name in INDEXES[:1]}
    for name in INDEXES:
        page = DOCS / name
        assert page in linked, f"{name} comes after the page that links to it"
        found = re.findall(r"\]\(([\w/]+\.(?:md|ipynb))(?:#[\w-]*)?\)", page.read_text(encoding="utf-8"))
        linked |= {page.parent / one for one in found}
    pages = {*PAGES, *DOCS.rglob("*.ipynb")}
    missing = sorted(str(page.relative_to(DOCS)) for page in pages - linked)
    assert not missing, f"no index page links to {missing}: add a line to docs/index.md"
