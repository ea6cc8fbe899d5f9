"""The config of a run as a typed tree, and the loader that reads it from YAML files and the command line.

`__init__.pyi` lists the names. They are imported when first used, because `--help` reads files of this folder and needs
no schema.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
