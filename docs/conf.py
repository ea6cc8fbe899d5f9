"""What Sphinx makes of docs/: pages in Markdown as the repository shows them, and notebooks that run while it builds.

sphinx-build -W --keep-going -n docs build/site

The reference pages are written from the docstrings by scripts/make_reference.py and committed, so nothing is imported
here. The navigation is what the index pages link to, section by section: there is no second list of pages. The built
pages ask no other host for anything (tests/test_site.py).
"""

import os
import re
import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

_ROOT = Path(__file__).resolve().parent.parent
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "jaxtrain"
author = "the authors of jaxtrain"
copyright = f"2026, {author}"
release = version = _PROJECT["version"]

extensions = ["myst_nb", "sphinx_copybutton"]
root_doc = "index"
# Blocks without a language hold commands beside YAML, pictures of text and output.
highlight_language = "text"
smartquotes = False

myst_heading_anchors = 4
# The gallery's index sets the width of its pictures, which only HTML can.
myst_enable_extensions = ["html_image"]

# A cell that fails, fails the build. Cells write their runs to a folder that is removed.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_in_temp = True
# Of a cell that hangs: one that trains took 20 s on an idle machine, and more than 120 s on one that others used.
nb_execution_timeout = 900
nb_merge_streams = True
# Cells use this interpreter and the jaxtrain of this checkout, on the CPU wherever the site is built.
os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
os.environ.update(JAX_PLATFORMS="cpu", COLUMNS="100")

html_theme = "furo"
html_title = "jaxtrain"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
# The lines of an example are copied without the prompt before them.
copybutton_prompt_text = ">>> "

# Pages whose links are the navigation below them.
_INDEXES = ("index", "gallery/README", "reference/index")
_LINK = re.compile(r"\[([^\]]+)\]\(([\w/]+)\.(?:md|ipynb)(?:#[\w-]*)?\)")


def _add_navigation(_: Sphinx, page: str, source: list[str]) -> None:
    """Give an index page a hidden table of contents for each of its sections: the pages that the section links to."""
    if page not in _INDEXES:
        return
    tables, seen = [], set()
    _, *sections = re.split(r"^## ", source[0], flags=re.MULTILINE) if page == "index" else ("", source[0])
    for section in sections:
        links = {link: name.replace("`", "") for name, link in _LINK.findall(section) if link not in seen}
        seen.update(links)
        options = f":caption: {section.splitlines()[0]}\n" if page == "index" else ""
        # Pages of the gallery and of the reference are listed by their own titles.
        rows = [f"{name} <{link}>" if page == "index" else link for link, name in links.items()]
        tables.append(f"```{{toctree}}\n:hidden:\n{options}\n" + "\n".join(rows) + "\n```\n")
    source[0] += "\n\n" + "\n".join(tables)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_navigation)
