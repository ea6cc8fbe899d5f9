"""The site: it builds without a warning, its links lead somewhere, and no page asks another host for anything."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Where .ci/run has built the site in a step of its own; elsewhere the first test builds it.
BUILT = "JAXTRAIN_BUILT_SITE"
pytestmark = pytest.mark.long
# Tags whose address a browser fetches when it shows a page; of a link, only with these relations.
FETCHED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "embed": "src",
    "object": "data",
}
RELATIONS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload", "manifest"}


class Page(HTMLParser):
    """What a built page links to, what a browser fetches for it, and the places in it."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in FETCHED and FETCHED[tag] in given:
            self.fetched.append(given[FETCHED[tag]])
        if tag == "link" and RELATIONS & set(given.get("rel", "").split()):
            self.fetched.append(given["href"])
        self.fetched += re.findall(r"url\(([^)]*)\)", given.get("style", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the built site."""
    if BUILT in os.environ:
        return Path(os.environ[BUILT])
    for package in ("sphinx", "furo", "myst_nb", "sphinx_copybutton"):
        pytest.importorskip(package, reason="pip install 'jaxtrain[docs]'")
    folder = tmp_path_factory.mktemp("site")
    # Kernels of the notebooks choose their own devices; the flags of this process are for its tests.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    words = ["-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-E", "docs", str(folder)]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def is_outside(address: str) -> bool:
    return address.strip("'\" ").startswith(("http:", "https:", "//"))


def local_links(path: Path, page: Page) -> Iterator[tuple[str, Path, str]]:
    """Link, file and place of each link of a page into the site."""
    for link in page.links:
        if not is_outside(link) and not link.startswith("mailto:"):
            file, _, place = link.partition("#")
            yield link, path if not file else (path.parent / file).resolve(), place


def test_nothing_is_fetched_from_another_host(site: Path, pages: dict[Path, Page]) -> None:
    found = [(path.name, address) for path, page in pages.items() for address in page.fetched if is_outside(address)]
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        addresses = re.findall(r"url\(([^)]*)\)", text) + re.findall(r"@import\s+([^;]+);", text)
        found += [(path.name, address) for address in addresses if is_outside(address)]
    for path in site.rglob("*.js"):
        text = path.read_text(encoding="utf-8")
        found += [
            (path.name, call) for call in re.findall(r"(?:fetch|import|importScripts)\(['\"]https?:[^)]*\)", text)
        ]
    assert not found
    assert len(pages) > 60


def test_links_lead_somewhere(pages: dict[Path, Page]) -> None:
    known = {path.resolve(): page for path, page in pages.items()}
    broken = [
        (path.name, link)
        for path, page in pages.items()
        for link, file, place in local_links(path, page)
        if not file.exists() or (place and file in known and place not in known[file].places)
    ]
    assert not broken


def test_every_page_is_reached_from_the_first(site: Path, pages: dict[Path, Page]) -> None:
    known = {path.resolve(): page for path, page in pages.items()}
    first = (site / "index.html").resolve()
    reached, ahead = {first}, [first]
    while ahead:
        path = ahead.pop()
        for _, file, _ in local_links(path, known[path]):
            if file in known and file not in reached:
                reached.add(file)
                ahead.append(file)
    # The index of terms is Sphinx's own: nothing here is written as its kind of entry. Search is reached by its box.
    assert {path.name for path in known.keys() - reached} <= {"genindex.html", "search.html"}


def test_search_knows_the_public_names(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert [name for name in ("make_train_step", "Checkpointer", "fsdp") if name.lower() not in index.lower()] == []


def test_notebooks_were_executed(site: Path) -> None:
    """The tutorial on sharding prints one loss per mesh; they differ in the order of sums in float32 alone."""
    text = (site / "tutorials" / "sharding.html").read_text(encoding="utf-8")
    losses = [float(loss) for loss in re.findall(r"loss [\d.]+ -&gt; ([\d.]+)", text)]
    assert len(losses) == 3
    assert max(losses) - min(losses) < 1e-3
    for name in ("own_model", "planning"):
        assert 'class="cell_output' in (site / "tutorials" / f"{name}.html").read_text(encoding="utf-8")
