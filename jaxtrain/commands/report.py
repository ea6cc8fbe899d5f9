"""`jaxtrain report`: draws the page of a run again, or one page about several. It starts no jax."""

import contextlib
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxtrain.commands.output import print_text
from jaxtrain.config.local_path import local_path
from jaxtrain.errors import ConfigError
from jaxtrain.run.mended import mend_run
from jaxtrain.run.open_run import read_run


def run_report(run_dirs: Sequence[str], *, output: str | None) -> int:
    """Write the page of one run, or the comparison of several.

    Args:
        run_dirs: directories of runs, or one folder with runs, such as that of a sweep.
        output: path of the page; None: `report.html` in the directory of one run or in the folder of runs,
            `compare.html` here for several.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: not the directory of a run, the same run twice, metrics that cannot be read, or a page that cannot
            be written.
    """
    from jaxtrain.metrics.report.compare import runs_below, write_comparison
    from jaxtrain.metrics.report.page import write_report

    folders = [local_path(run_dir, what="run directory") for run_dir in run_dirs]
    below = runs_below(folders[0]) if len(folders) == 1 and not (folders[0] / "run.json").exists() else []
    if below:
        path = _page_path(output) or folders[0] / "report.html"
        with _said_of_a_page(path):
            write_comparison(below, path)
        print_text(f"report: {path}")
        return 0
    for folder in folders:
        mend_run(folder)
        read_run(folder)
    seen: dict[Path, Path] = {}
    for folder in folders:
        if folder.resolve() in seen:
            raise ConfigError(f"{folder} is given twice; give each run once, as in jaxtrain report runs/a runs/b")
        seen[folder.resolve()] = folder
    path = _page_path(output) or (folders[0] / "report.html" if len(folders) == 1 else Path("compare.html"))
    with _said_of_a_page(path):
        if len(folders) == 1:
            write_report(folders[0], path=path)
        else:
            write_comparison(folders, path)
    print_text(f"report: {path}")
    return 0


@contextlib.contextmanager
def _said_of_a_page(path: Path) -> Iterator[None]:
    """Say where a page cannot be written; that a disk is full is said as everywhere."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file with --output FILE") from None


def _page_path(output: str | None) -> Path | None:
    if output is None:
        return None
    path = local_path(output, what="--output")
    if path.is_dir():
        raise ConfigError(
            f"--output {output} is a folder; give the path of a page, as in --output {path / 'report.html'}"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {path.parent}; make it, or give another path")
    return path
