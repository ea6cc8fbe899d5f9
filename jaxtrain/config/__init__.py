"""The config of a run as a typed tree, and the loader that reads it from YAML files and the command line.

The names are imported when first used: `--help` reads files of this folder and needs no schema.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtrain.config.files import find_config, shipped_configs
    from jaxtrain.config.load import Loaded, load_config
    from jaxtrain.config.schema import Config

__all__ = ["Config", "Loaded", "find_config", "load_config", "shipped_configs"]
_HOMES = {"Config": "schema", "find_config": "files", "shipped_configs": "files"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'jaxtrain.config' has no attribute {name!r}")

    value = getattr(import_module(f"jaxtrain.config.{_HOMES.get(name, 'load')}"), name)
    globals()[name] = value
    return value
