"""`jaxtrain report`: draws the page of a run again, or one page about several. It starts no jax."""

import argparse
from pathlib import Path

from jaxtrain.commands.shared import print_text, writes
from jaxtrain.config.arguments import local_path
from jaxtrain.config.files import read_run
from jaxtrain.metrics.report.compare import runs_below, write_comparison
from jaxtrain.metrics.report.page import write_report


def run(arguments: argparse.Namespace) -> int:
    """Write the page of one run, or the comparison of several or of a folder of runs; 0."""
    folders = [local_path(run_dir, what="run directory") for run_dir in arguments.run_dirs]
    is_one = len(folders) == 1
    below = runs_below(folders[0]) if is_one and not (folders[0] / "run.json").exists() else []
    for folder in [] if below else folders:
        read_run(folder)
    path = folders[0] / "report.html" if is_one else Path("compare.html")
    if arguments.output is not None:
        path = local_path(arguments.output, what="--output")
    with writes("--output"):
        if is_one and not below:
            write_report(folders[0], path=path)
        else:
            write_comparison(below or folders, path)
    print_text(f"report: {path}")
    return 0
