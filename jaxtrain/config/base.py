"""The base class of every config group: frozen, strict about types, without unknown keys, one line of doc per field."""

import contextlib
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, ValidationError

from jaxtrain.config.arguments import shown
from jaxtrain.errors import ConfigError


class Group(BaseModel):
    """A frozen group of settings; `jaxtrain config` prints the docstring of each field."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
    )


def first_mistake(error: ValidationError) -> str:
    """Returns one line for the first mistake in a config that Python code made; `load_config` knows more of its own.

    Args:
        error: What pydantic found.
    """
    found = error.errors()[0]
    key = ".".join(map(str, found["loc"]))
    if found["type"] == "extra_forbidden":
        return f"Config has no key {key!r}; write load_config({{...}}), which names the nearest key"
    reason = found["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
    return f"Config: {key} is {shown(found['input'])}; {reason}"


@contextlib.contextmanager
def mistakes_told_by_pydantic() -> Iterator[None]:
    """Turns a `ConfigError` into the `ValueError` that pydantic collects, so that the loader adds where it was set."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error)) from None
