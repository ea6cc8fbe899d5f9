"""`jaxtrain train`: trains what a config describes, or resumes the run; with `--restarts` in a watched process.

No jax here, until the run itself begins.
"""

import argparse
import sys

from jaxtrain.commands.launch import JAXTRAIN, Signals, exit_code, how_ended, kill_child, start_child
from jaxtrain.config import load_config
from jaxtrain.run.directory import folder_of
from jaxtrain.run.supervise import supervise


def run(arguments: argparse.Namespace) -> int:
    """Train what a config describes; the exit code 0."""
    if arguments.restarts:
        return _run_restarted(arguments)
    from jaxtrain.commands.shared import own_code
    from jaxtrain.run.run_config import run_config

    loaded = load_config(arguments.config, overrides=arguments.overrides)
    with own_code(loaded.config):
        run_config(loaded, run_dir=arguments.run_dir, resume=arguments.resume, emulate=arguments.emulate)
    return 0


def _run_restarted(arguments: argparse.Namespace) -> int:
    """Train in a process of its own, and start it again after failures; the exit code of the last start."""
    config = arguments.config
    overrides = arguments.overrides
    run_dir = arguments.run_dir
    folder = folder_of(load_config(config, overrides=overrides), run_dir)
    options = [] if run_dir is None else ["--run-dir", run_dir]
    options += [] if arguments.emulate is None else ["--emulate", str(arguments.emulate)]
    options += ["--debug"] if "--debug" in sys.argv else []
    words = ["train", config, *overrides, *options]
    with Signals() as signals:

        def start(number: int, has_begun: bool) -> int:
            mode = "auto" if has_begun and arguments.resume == "never" else arguments.resume
            child = start_child([*JAXTRAIN, *words, "--resume", mode], environment={})
            signals.children.clear()
            signals.add(child)
            try:
                return exit_code(child.wait())
            finally:
                kill_child(child)

        return supervise(start, folder, restarts=arguments.restarts, asked=signals.asked, how_ended=how_ended)
