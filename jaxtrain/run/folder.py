"""Where a run is written. No jax here."""

import re
from pathlib import Path

from jaxtrain.config import Loaded
from jaxtrain.config.local_path import local_path
from jaxtrain.config.run_name import check_run_name
from jaxtrain.errors import ConfigError

# Of the checkpoints alone: the lock and files that grow are what no object store has.
_INSTEAD = "use a local folder; checkpoints alone can be elsewhere: checkpoint.directory=gs://bucket/name (or s3://)"


def run_folder(run_dir: str | Path | None, name: str) -> Path:
    """The directory of a run: the one that was given, or runs/<name>.

    Raises:
        ConfigError: the name cannot be that of a folder.
    """
    if run_dir is not None:
        return local_path(run_dir, what="run directory", instead=_INSTEAD)
    folder = local_path(name, what="name", instead=_INSTEAD)
    try:
        check_run_name(name)
    except ValueError as error:
        raise ConfigError(f"name: {error}") from None
    return Path("runs") / folder


def folder_of(loaded: Loaded, run_dir: str | Path | None) -> Path:
    """The directory of the run of a config: that which was given, the run that the config is of, or runs/<name>."""
    if run_dir is None and loaded.run_dir is not None:
        return loaded.run_dir
    return run_folder(run_dir, loaded.name)


def numbered_folder(name: str) -> Path:
    """A new directory runs/<name>-<number>, the same for all processes; every process calls this.

    Args:
        name: of a model; characters that a folder's name may lack become dashes.
    """
    from jaxtrain.checkpoint.storage import from_process_0, is_process_0

    name = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:60] or "run"
    # Every process decides, and what process 0 decided holds: the others make no directory.
    return Path("runs") / f"{name}-{from_process_0(lambda: _free_number(name) if is_process_0() else 0)}"


def _free_number(name: str) -> int:
    """The number after the largest one; its directory is made, so that no other run takes it."""
    endings = [path.name.removeprefix(f"{name}-") for path in Path("runs").glob(f"{name}-*")]
    number = 1 + max((int(ending) for ending in endings if ending.isdecimal()), default=0)
    while True:
        try:
            (Path("runs") / f"{name}-{number}").mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError:  # the lock, which is written there next, says why
            return number
        else:
            return number
