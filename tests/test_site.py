"""The site: it builds without a warning, its notebooks ran, and no page asks another host for anything."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# Where .ci/run has built the site in a step of its own; elsewhere the first test builds it.
BUILT = "JAXTRAIN_BUILT_SITE"
# Tags whose address a browser fetches when it shows a page; of a link, only with these relations.
FETCHED = {name: "src" for name in ("script", "img", "iframe", "source", "video", "embed")} | {"object": "data"}
RELATIONS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload", "manifest"}


class Page(HTMLParser):
    """What a browser fetches for a built page."""

    def __init__(self, path: Path):
        super().__init__()
        self.fetched: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
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
        pytest.importorskip(package, reason="pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site") / "site"
    # Kernels of the notebooks choose their own devices; the flags of this process are for its tests.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-E", "docs", str(folder)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.long
def test_nothing_is_fetched_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    addresses = [(path.name, address) for path in pages for address in Page(path).fetched]
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        addresses += [(path.name, one) for one in re.findall(r"(?:url\(|@import\s+)([^;)]*)[;)]", text)]
    for path in site.rglob("*.js"):
        text = path.read_text(encoding="utf-8")
        calls = re.findall(r"(?:fetch|import|importScripts)\(['\"](https?:[^)]*)\)", text)
        addresses += [(path.name, one) for one in calls]
    outside = [one for one in addresses if one[1].strip("'\" ").startswith(("http:", "https:", "//"))]
    assert not outside
    assert len(pages) > 60


@pytest.mark.long
def test_tutorials_were_executed(site: Path) -> None:
    """The one on sharding prints one loss per mesh; they differ in the order of sums in float32 alone."""
    text = (site / "tutorials" / "sharding.html").read_text(encoding="utf-8")
    losses = [float(loss) for loss in re.findall(r"loss [\d.]+ -&gt; ([\d.]+)", text)]
    assert len(losses) == 3
    assert max(losses) - min(losses) < 1e-3
    for name in ("own_model", "planning"):
        assert 'class="cell_output' in (site / "tutorials" / f"{name}.html").read_text(encoding="utf-8")


def cells_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def test_notebooks_are_kept_without_outputs() -> None:
    assert NOTEBOOKS
    assert [path.name for path in NOTEBOOKS for cell in cells_of(path) if cell.get("outputs")] == []


@pytest.mark.long
def test_the_first_notebook_shows_one_bar_and_nothing_in_red(site: Path) -> None:
    cells = cells_of(site.parent / "jupyter_execute" / "notebooks" / "first_run.ipynb")
    kept = cells_of(ROOT / "docs" / "notebooks" / "first_run.ipynb")
    assert ["".join(cell["source"]) for cell in cells] == ["".join(cell["source"]) for cell in kept]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []
    (progress,) = [output["data"]["text/html"] for output in outputs if output["output_type"] == "display_data"]
    assert '<progress value="200" max="200"' in "".join(progress)
    results = [output["data"] for output in outputs if output["output_type"] == "execute_result"]
    assert "Result of runs/first" in "".join(results[0]["text/plain"])
    assert len([data for data in results if "image/png" in data]) == 1
    said = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    # A run of 200 steps on the digits is right on more than nine of ten held-out rows.
    assert float(said.rpartition("rows, ")[2].split("%")[0]) > 90


@pytest.mark.long
@pytest.mark.parametrize(
    ("stems", "page"),
    [
        ("freez layer", "optimizers"),
        ("memori", "memory"),  # "out" and "of" are stop words
        ("learn rate schedul", "optimizers"),
        ("resum", "checkpoints"),
        ("huggingfac", "pretrained"),
    ],
)
def test_search_finds_the_page(stems: str, page: str, site: Path) -> None:
    """The index keeps the stems of the words of texts and of titles, each with one page or a list of pages."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    number = index["docnames"].index(page)
    for stem in stems.split():
        found = [index[table].get(stem, []) for table in ("terms", "titleterms")]
        assert any(number == one or (isinstance(one, list) and number in one) for one in found), stem
