"""Errors inside the functions of the user's that a config names, once they run: one line with the place."""

import contextlib
from collections.abc import Iterator

from jaxtrain.config.kinds import called_parts
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError, UserError
from jaxtrain.runtime.call import user_place


@contextlib.contextmanager
def own_code(config: Config) -> Iterator[None]:
    """Give an error that passed through the user's code as one line that names the line of that code.

    The models, losses and rows that functions of a config make are applied long after the functions returned.

    Args:
        config: whose functions may be called inside.

    Raises:
        ConfigError: in place of another error that passed through code which is neither ours nor of a library.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        place = user_place(error) if called_parts(config) else None
        if place is None or "RESOURCE_EXHAUSTED" in str(error):
            raise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        said = f": {first[:300]}" if first else ""
        raise ConfigError(f"{place} raised {type(error).__name__}{said}; --debug shows the traceback") from error
