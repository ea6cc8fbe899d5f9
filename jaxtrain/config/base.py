"""What every group of settings is made of: the base class, bounded numbers, and functions of the user. No jax here."""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from jaxtrain.config.errors import CALLED, NAMED, explain
from jaxtrain.errors import ConfigError

PositiveInt = Annotated[int, Field(gt=0, le=10**9)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=1e30)]
NonNegative = Annotated[float, Field(ge=0, le=1e30)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
# A literal 1 takes true too, which is equal to it.
NotBool = BeforeValidator(lambda value: str(value).lower() if isinstance(value, bool) else value)
Flags = Annotated[tuple[Annotated[Literal[0, 1], NotBool], ...], Field(strict=False, min_length=1)]
SomeNames = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class _OneLine(type(BaseModel)):
    """Makes a mistake in a call of a class one line; a mistake inside a config stays pydantic's, with its place."""

    if not TYPE_CHECKING:  # type checkers see the fields

        def __call__(cls: Any, *arguments: Any, **values: Any) -> Any:
            values |= zip(cls.model_fields, arguments, strict=False)
            try:
                return super().__call__(**values)
            except ValidationError as error:
                name = cls.__name__.removesuffix("Config") or "Config"
                raise ConfigError(f"{name}: {explain(error, cls, values)}") from None


class Group(BaseModel, metaclass=_OneLine):
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


def kind_or(default: str) -> BeforeValidator:
    """A validator of a union of kinds, which takes a mapping without a kind as one of the default kind."""
    return BeforeValidator(
        lambda value: {"kind": default, **value} if isinstance(value, dict) and "kind" not in value else value
    )


_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _check_path(path: str) -> str:
    if _FUNCTION.fullmatch(path):
        return path
    raise ValueError(f"{path!r} names no function; write module:function, as in my_package.models:build")


def _as_in_json(arguments: object) -> object:
    """Returns arguments with tuples as lists, as a config file and `run.json` hold them."""
    return json.loads(json.dumps(arguments, allow_nan=False))


class Call(Group):
    """A function of your own and its arguments. A config that names one runs its code."""

    call: Annotated[str, AfterValidator(_check_path)]
    """Your function, as module:function; the module is found in the current directory or on Python's path."""
    args: Annotated[dict[str, Any], BeforeValidator(_as_in_json)] = {}
    """The arguments of the function, by name."""


class CalledTask(Call):
    """A task of your own: a function that returns a jaxtrain.Task."""


def named_or_called(task: object) -> str:
    """Returns the tag of the form in which a task is given."""
    return CALLED if isinstance(task, Mapping | Call) else NAMED
