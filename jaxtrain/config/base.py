"""What every config group shares: frozen, strict, no unknown keys, one line of doc a field."""

import contextlib
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from jaxtrain.errors import ConfigError


class Group(BaseModel):
    """A frozen group of settings; a field's docstring is what `jaxtrain config` prints."""

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
    """Turn a `ConfigError` into what pydantic catches in a validator, so that the loader can add where it was set."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error)) from None
