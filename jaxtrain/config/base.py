"""What every config group shares: frozen, strict, no unknown keys, one line of doc a field."""

from pydantic import BaseModel, ConfigDict


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
