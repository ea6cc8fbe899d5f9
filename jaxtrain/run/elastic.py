"""A run that goes on with other devices than before: the planner chooses a layout where the config's cannot be."""

import dataclasses
from pathlib import Path

from jaxtrain.checkpoint.directory import live_steps
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.config import Loaded
from jaxtrain.config.schema import ParallelConfig
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.layout.degrees import AXES, config_degrees, resolve_degrees
from jaxtrain.runtime.host import attempt


def with_fitting_layout(loaded: Loaded, run_dir: Path) -> Loaded:
    """The config with `parallel: auto` where a run that goes on has other devices than its degrees are for.

    Only under a supervisor (`--restarts`), who cannot ask anybody. The batches stay the same, and so does their order.

    Args:
        loaded: the config.
        run_dir: directory of the run; without checkpoints nothing changes, since degrees that do not fit are a mistake.
    """
    import jax

    config = loaded.config
    if attempt() is None or config.parallel.auto or not _has_checkpoint(run_dir):
        return loaded
    degrees = config_degrees(config.parallel)
    count = len(jax.devices())
    try:
        resolve_degrees(degrees, count)
    except ConfigError:
        kept = config.parallel.model_dump(include=config.parallel.model_fields_set - set(AXES))
        parallel = ParallelConfig(**{**kept, "auto": True})
        shown = " ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree not in (1, "auto"))
        note = (
            f"parallel ({shown}) does not fit the {count} devices: going on with another layout, and the same batches"
        )
        changed = config.model_copy(update={"parallel": parallel})
        return dataclasses.replace(loaded, config=changed, notes=(*loaded.notes, note))
    return loaded


def _has_checkpoint(run_dir: Path) -> bool:
    try:
        return bool(live_steps(checkpoint_folder(run_dir)))
    except CheckpointError:
        return False
