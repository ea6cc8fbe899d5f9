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
    """Train what a config describes; return 0, or with `--restarts` the exit code of the last start."""
    loaded = load_config(arguments.config, overrides=arguments.overrides)
    if arguments.restarts:
        # The command of this process again; of an option that is given twice, the last one counts.
        command = [*JAXTRAIN, *sys.argv[1:], "--restarts=0"]
        run_dir = folder_of(loaded, arguments.run_dir)
        return run_restarted(command, [{}], run_dir=run_dir, restarts=arguments.restarts)
    from jaxtrain.run.run_config import run_config

    run_config(loaded, run_dir=arguments.run_dir, resume=arguments.resume, emulate=arguments.emulate)
    return 0
