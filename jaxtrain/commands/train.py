"""`jaxtrain train`: trains what a config describes, or resumes the run."""

from collections.abc import Sequence

from jaxtrain.commands.own_code import own_code
from jaxtrain.config import load_config
from jaxtrain.run.mended import mend_run
from jaxtrain.run.trainer import run_config


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
    mend_run(config)
    loaded = load_config(config, overrides=overrides)
    with own_code(loaded.config):
        run_config(loaded, run_dir=run_dir, resume=resume, emulate=emulate)
    return 0
