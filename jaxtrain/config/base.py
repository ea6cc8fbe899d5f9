"""The base class of every config group: frozen, strict about types, without unknown keys, one line of doc per field."""

import contextlib
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

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


@contextlib.contextmanager
def mistakes_told_by_pydantic() -> Iterator[None]:
    """Turns a `ConfigError` into the `ValueError` that pydantic collects, so that the loader adds where it was set."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error)) from None
