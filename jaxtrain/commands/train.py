"""`jaxtrain train`: trains what a config describes, or resumes the run; with `--restarts` in a watched process.

No jax here, until the run itself begins.
"""

import argparse
import sys

from jaxtrain.commands.launch import run_restarted
from jaxtrain.commands.processes import JAXTRAIN
from jaxtrain.config import load_config
from jaxtrain.run.directory import folder_of


def run(arguments: argparse.Namespace) -> int:
    """Train what a config describes; return 0."""
    if arguments.restarts:
        return _run_restarted(arguments)
    from jaxtrain.commands.shared import own_code
    from jaxtrain.run.run_config import run_config

    loaded = load_config(arguments.config, overrides=arguments.overrides)
    with own_code(loaded.config):
        run_config(loaded, run_dir=arguments.run_dir, resume=arguments.resume, emulate=arguments.emulate)
    return 0


def _run_restarted(arguments: argparse.Namespace) -> int:
    """Train in a process of its own, and start it again after failures; return the exit code of the last start."""
    folder = folder_of(load_config(arguments.config, overrides=arguments.overrides), arguments.run_dir)
    command = [*JAXTRAIN, "train", arguments.config, *arguments.overrides, "--resume", arguments.resume]
    if arguments.run_dir is not None:
        command += ["--run-dir", arguments.run_dir]
    if arguments.emulate is not None:
        command += ["--emulate", str(arguments.emulate)]
    if "--debug" in sys.argv:
        command.append("--debug")
    return run_restarted(command, [{}], run_dir=folder, restarts=arguments.restarts)
