"""`jaxtrain train`: a whole run."""

from collections.abc import Sequence

from jaxtrain.config import load_config
from jaxtrain.run.trainer import run_config


def run_train(config: str, overrides: Sequence[str], *, run_dir: str | None, resume: str, emulate: int | None) -> int:
    """Train; see `jaxtrain.run.trainer.run_config`."""
    run_config(load_config(config, overrides=overrides), run_dir=run_dir, resume=resume, emulate=emulate)
    return 0
