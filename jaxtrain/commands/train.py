"""`jaxtrain train`: trains what a config describes, or resumes the run; with `--restarts` in a process that is watched.

No jax here, until the run itself begins.
"""

import sys
import time
from collections.abc import Sequence

from jaxtrain.commands.launch import JAXTRAIN, Signals, exit_code, how_ended, kill_child, start_child
from jaxtrain.config import load_config
from jaxtrain.metrics.time_spent import counted_from
from jaxtrain.run.folder import folder_of
from jaxtrain.run.mended import mend_run
from jaxtrain.run.supervise import Policy, keeps_old_run, supervise
from jaxtrain.runtime.host import ATTEMPT


def run_train(config: str, overrides: Sequence[str], *, run_dir: str | None, resume: str, emulate: int | None) -> int:
    """Train what a config describes.

    Args:
        config: a shipped name or a path.
        overrides: `key=value` settings that replace those of the config.
        run_dir: directory of the run; None: runs/<name>.
        resume: "auto", "must" or "never"; see `jaxtrain.run.trainer.run_config`.
        emulate: number of CPU devices to emulate; None: the devices of the machine.

    Returns:
        The exit code 0.
    """
    with counted_from(time.monotonic()):
        from jaxtrain.commands.own_code import own_code
        from jaxtrain.run.trainer import run_config

        mend_run(config)
        loaded = load_config(config, overrides=overrides)
        with own_code(loaded.config):
            run_config(loaded, run_dir=run_dir, resume=resume, emulate=emulate)
    return 0


def run_restarted_train(
    config: str, overrides: Sequence[str], *, run_dir: str | None, resume: str, emulate: int | None, restarts: int
) -> int:
    """Train in a process of its own, and start it again after a failure that another start may get over.

    Args:
        config, overrides, run_dir, resume, emulate: see `run_train`.
        restarts: the largest number of restarts.

    Returns:
        The exit code of the last start.

    Raises:
        ConfigError: the config is wrong, or the process cannot be started.
    """
    mend_run(config)
    folder = folder_of(load_config(config, overrides=overrides), run_dir)
    options = [] if run_dir is None else ["--run-dir", run_dir]
    options += [] if emulate is None else ["--emulate", str(emulate)]
    options += ["--debug"] if "--debug" in sys.argv else []
    words = ["train", config, *overrides, *options]
    with Signals() as signals:
        holds_old_run = keeps_old_run(folder)

        def start(number: int) -> int:
            mode = "auto" if number and resume == "never" and not holds_old_run() else resume
            child = start_child([*JAXTRAIN, *words, "--resume", mode], environment={ATTEMPT: str(number)})
            signals.children.clear()
            signals.add(child)
            try:
                return exit_code(child.wait())
            finally:
                kill_child(child)

        return supervise(start, Policy(restarts, folder, signals.asked, how_ended, lambda: None))
