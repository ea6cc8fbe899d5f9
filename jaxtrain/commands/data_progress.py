"""How far `jaxtrain data prepare` is: a bar on a terminal, a line now and then elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from jaxtrain.runtime.terminal import print_remark

if TYPE_CHECKING:
    from jaxtrain.data.sources.prepare import Prepared

# Between lines where there is no terminal: a log of an hour has 120.
_SECONDS_BETWEEN_LINES = 30.0


@contextlib.contextmanager
def prepare_progress() -> Iterator[Callable[["Prepared"], None]]:
    """Yield what shows how far the writing of token files is."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [BarColumn(), DownloadColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn()]
    with Progress(TextColumn("encoding"), *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("encoding", total=None, tokens="0")

        def show(found: "Prepared") -> None:
            bar.update(task, completed=found.position, total=found.total or None, tokens=f"{found.tokens:,}")

        yield show


class _Lines:
    """Writes a line every half minute."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    def __call__(self, found: "Prepared") -> None:
        seconds = time.monotonic()
        if seconds - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = seconds
        share = f"{found.position / found.total:.0%}, " if found.total else ""
        print_remark(
            f"encoding: {share}{found.documents:,} documents, {found.tokens:,} tokens, {seconds - self._began:.0f} s"
        )
