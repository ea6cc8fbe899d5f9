"""The config of a run as a typed tree, and the loader that reads it from YAML files and the command line."""

from jaxtrain.config.load import Loaded, find_config, load_config, shipped_configs
from jaxtrain.config.schema import Config

__all__ = ["Config", "Loaded", "find_config", "load_config", "shipped_configs"]
