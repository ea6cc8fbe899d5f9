from .files import find_config as find_config
from .files import shipped_configs as shipped_configs
from .load import Loaded as Loaded
from .load import load_config as load_config
from .schema import Config as Config
