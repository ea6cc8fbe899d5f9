"""Runs pages of docs/gallery/ as they are printed, and puts their pictures and what they print into the pages.

python scripts/make_gallery.py
python scripts/make_gallery.py vae ddpm
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "gallery"
_SECTIONS = ("The model", "The training", "The picture")
_LAST_LINES_OF_FIT = ("done: ", "report: ")
_PRINTED = re.compile(r"^```text\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """The code of a page.

    Attributes:
        name: of its file, its picture and its run.
        model, training, picture: its three blocks.
    """

    name: str
    model: str
    training: str
    picture: str

    @property
    def program(self) -> str:
        """The three blocks as one program."""
        return "\n".join((self.model, self.training, self.picture))

    @property
    def num_training_lines(self) -> int:
        """Lines of the training block, without imports and blank lines."""
        lines = [line.strip() for line in self.training.splitlines()]
        return len([line for line in lines if line and not line.startswith(("import ", "from "))])


def page_names() -> list[str]:
    """The names of all pages, without the index."""
    return sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "README")


def read_page(name: str) -> Page:
    """Take the blocks of a page out of its text.

    Raises:
        ValueError: the page does not have one block of Python under each of its three headings.
    """
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^## ([^\n]*)\n+```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    if tuple(heading for heading, _ in blocks) != _SECTIONS:
        raise ValueError(f"{name}.md has blocks under {[heading for heading, _ in blocks]}; wanted is {_SECTIONS}")
    return Page(name, *(block for _, block in blocks))


def run_page(page: Page, folder: Path) -> str:
    """Run a page in a process of its own, on one device.

    Args:
        page: what is run.
        folder: where it runs and leaves its picture.

    Returns:
        What it printed.

    Raises:
        subprocess.CalledProcessError: it failed; standard error has been passed on.
    """
    program = folder / "page.py"  # a page may have the name of a package, such as equinox
    program.write_text(page.program, encoding="utf-8")
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    # The flags of a test process emulate devices and leave out optimizations, which a user's process does not.
    environment = {**os.environ, "PYTHONPATH": paths, "MPLBACKEND": "Agg", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, program.name], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return done.stdout


def printed_on(name: str) -> str:
    """What the page says that it prints."""
    found = _PRINTED.search((FOLDER / f"{name}.md").read_text(encoding="utf-8"))
    return found.group(1) if found else ""


def update(name: str) -> None:
    """Run a page, and put its picture and what it printed into docs/gallery/."""
    with tempfile.TemporaryDirectory() as folder:
        lines = run_page(read_page(name), Path(folder)).splitlines()
        printed = "".join(f"{line}\n" for line in lines if not line.startswith(_LAST_LINES_OF_FIT))
        with Image.open(Path(folder) / f"{name}.png") as picture:
            # A palette halves the size, which stays in the history of the repository for good.
            picture.convert("RGB").quantize(128).save(FOLDER / f"{name}.png", optimize=True)
    path = FOLDER / f"{name}.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(_PRINTED.sub(lambda _: f"```text\n{printed}```", text), encoding="utf-8")
    sys.stdout.write(f"{name}: {printed.strip()}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Update the pages that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"of {', '.join(page_names())}; default: all")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.pages) - set(page_names()))
    if unknown:
        parser.error(f"no page {unknown[0]}; the pages are {', '.join(page_names())}")
    for name in options.pages or page_names():
        update(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
