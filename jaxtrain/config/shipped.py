"""The shipped configs, and the file that a name stands for. No jax here; no schema either: listing them needs none."""

import difflib
from pathlib import Path

from jaxtrain.config.local_path import local_path
from jaxtrain.errors import ConfigError


def config_folder() -> Path:
    """Folder of the shipped configs: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def shipped_configs() -> list[str]:
    """Names of the shipped configs, sorted."""
    return sorted(path.stem for path in config_folder().glob("*.yaml"))


def is_shipped(name: str) -> bool:
    """Whether a config of this name is shipped."""
    # Names that no file can have are answered too.
    return name in shipped_configs()


def find_config(name: str) -> Path:
    """The file of a shipped name or a path.

    Raises:
        ConfigError: there is no such config; names the nearest.
    """
    if is_shipped(name):
        return config_folder() / f"{name}.yaml"
    path = local_path(name, what="config")
    if path.is_file():
        return path
    if path.exists() and not path.is_dir():
        raise ConfigError(f"config {name!r} is a pipe or a device; name a .yaml file")
    if path.is_dir():
        raise ConfigError(
            f"config {name!r} is a folder without run.json; name a .yaml file, the directory of a run, or one of "
            f"{', '.join(shipped_configs())}"
        )
    # Of names that are as close, one that begins as the given one is meant.
    close = sorted(
        difflib.get_close_matches(path.stem, shipped_configs()), key=lambda one: not one.startswith(path.stem)
    )
    hint = f"did you mean {close[0]!r}?" if close else f"shipped: {', '.join(shipped_configs())}"
    raise ConfigError(f"no config {name!r}, neither a shipped name nor a file; {hint}")
