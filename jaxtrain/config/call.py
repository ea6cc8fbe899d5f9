"""Functions of your own that a config names as `call: module:function`; nothing is imported here. No jax here."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from jaxtrain.config.base import Group

# The tags of the two forms of `task`: a name, or a group that names a function.
NAMED, CALLED = "named", "called"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def _check_path(path: str) -> str:
    """Returns `module:function` as it is.

    Raises:
        ValueError: It is of another form; says how to write it.
    """
    module, colon, function = path.partition(":")
    if colon and _MODULE.fullmatch(module) and function.isidentifier() and not module.endswith(".py"):
        return path
    guess = "my_package.models:build"
    file, _, name = re.sub(r"\.py\b", "", path).replace("/", ".").replace("\\", ".").strip(".").partition(":")
    if not name and "." in file:  # my_package.models.build
        file, _, name = file.rpartition(".")
    if _MODULE.fullmatch(file) and name.isidentifier():
        guess = f"{file}:{name}"
    raise ValueError(f"{path!r} names no function of a module; write module:function, as in {guess}")


def _check_arguments(arguments: object) -> object:
    """Returns arguments with tuples as lists, as a config file and `run.json` hold them.

    Raises:
        ValueError: A value is not one of JSON.
    """
    if not isinstance(arguments, Mapping):
        return arguments
    return {str(name): _plain(value, str(name)) for name, value in arguments.items()}


def _plain(value: object, name: str) -> Any:
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise ValueError(f"{name} is {value}, which run.json cannot hold; leave it out, or write it as a text")
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}") for key, item in value.items()}
    raise ValueError(
        f"{name} is of type {type(value).__name__}, which a config file cannot hold; give numbers, texts, true, "
        "false, null, lists and mappings, and let the function make the rest of them"
    )


class Call(Group):
    """A function of your own and its arguments. A config that names one runs its code."""

    call: Annotated[str, AfterValidator(_check_path)]
    """Your function, as module:function; the module is found in the current directory or on Python's path."""
    args: Annotated[dict[str, Any], BeforeValidator(_check_arguments)] = {}  # noqa: RUF012  pydantic copies it
    """The arguments of the function, by name."""


class CalledTask(Call):
    """A task of your own: a function that returns a jaxtrain.Task."""


def named_or_called(task: object) -> str:
    """Returns the tag of the form in which a task is given."""
    return CALLED if isinstance(task, Mapping | Call) else NAMED
