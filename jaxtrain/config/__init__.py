"""The typed config tree and its loader."""

from jaxtrain.config.load import Loaded, find_config, load_config, shipped_configs
from jaxtrain.config.schema import Config

__all__ = ["Config", "Loaded", "find_config", "load_config", "shipped_configs"]
