"""Calls the functions that a config names; a mistake in what the user wrote is one line with its place. No jax here."""

import difflib
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from jaxtrain.errors import ConfigError, UserError


def call_function(
    group: str,
    call: str,
    arguments: Mapping[str, Any],
    *,
    offered: Mapping[str, Any] | None = None,
    must_take: Sequence[str] = (),
    error: type[UserError] = ConfigError,
) -> Any:
    """Import a function, check its arguments against its signature, and call it.

    The module is found as `python -m` finds it: in the current directory first, then on Python's path.

    Args:
        group: of the config that names the function, for messages: "model".
        call: "module:function".
        arguments: by name, as the config gives them.
        offered: what else the function gets where its signature names it and the config does not give it. A value of
            None is given only to a parameter without a default.
        must_take: names of `offered` that the function has to take, because the config sets them.
        error: type of the error for what is wrong inside the module and the function.

    Returns:
        What the function returns.

    Raises:
        ConfigError: no such module or function, or arguments that the function does not take.
        UserError: of the type `error`: the module cannot be imported, or the function raised. An error of ours keeps
            its type.
    """
    where, name = f"{group}.call={call}", call.partition(":")[2]
    module, function = _find(where, call, error)
    parameters = inspect.signature(function).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes = f"it takes {', '.join(named) or 'no arguments'}"
    offered, given = offered or {}, dict(arguments)
    for key in given:
        if key not in named and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise ConfigError(
                f"{group}.args.{key}: {name} of {where} has no such parameter, {takes}{_near(key, named)}"
            )
    for key in must_take:
        if key in given:
            raise ConfigError(f"{group}.{key} and {group}.args.{key} are both set; leave one of them out")
        if key not in named:
            raise ConfigError(
                f"{group}.{key} is set, but {name} of {where} has no parameter {key}, {takes}; set {group}.{key}=null"
            )
    for key, parameter in named.items():
        needs = parameter.default is parameter.empty
        if key not in given and key in offered and (offered[key] is not None or needs):
            given[key] = offered[key]
        elif key not in given and needs:
            raise ConfigError(f"{where}: {name} needs {key}; set {group}.args.{key}")
    try:
        return function(**given)
    except Exception as raised:
        _raise(f"{where}: {name} raised", raised, module, error)


def _find(where: str, call: str, error: type[UserError]) -> tuple[ModuleType, Callable[..., Any]]:
    """The module and the function that `module:function` names."""
    name, _, attribute = call.partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    # A file that was written since the last import of its folder would not be found.
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as raised:
        missing = raised.name if isinstance(raised, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            _raise(f"{where}: importing {name} raised", raised, None, error)
        parent, _, last = missing.rpartition(".")
        folder = Path(next(iter(getattr(sys.modules.get(parent), "__path__", [])), here))
        hint = _near(last, (path.stem for path in folder.iterdir())) or "; run the command where it is"
        raise ConfigError(f"{where}: there is no module {missing!r} in {folder} or on Python's path{hint}") from raised
    function = getattr(module, attribute, None)
    if callable(function):
        return module, function
    functions = [found for found, value in vars(module).items() if callable(value) and not found.startswith("_")]
    hint = _near(attribute, functions)
    raise ConfigError(f"{where}: the module {name} ({_short(module.__file__)}) has no function {attribute!r}{hint}")


def _near(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _raise(what: str, raised: BaseException, module: ModuleType | None, error: type[UserError]) -> NoReturn:
    """Raise an error of ours in place of one that the user's code raised, with the line of that code."""
    place = user_place(raised, file=getattr(module, "__file__", None))
    line = " ".join(str(raised).split())[:300]
    if isinstance(raised, UserError):
        kind, said = type(raised), f"{what.removesuffix(' raised')}: {line}"
    else:
        line = raised.msg if isinstance(raised, SyntaxError) else line
        kind, said = error, f"{what} {type(raised).__name__}" + (f": {line}" if line else "")
    raise kind(f"{said} ({place}); --debug shows the traceback" if place else said) from raised


def user_place(raised: BaseException, *, file: str | None = None) -> str | None:
    """The innermost line of the user's code that an error passed through, as "my_package/models.py:12".

    Args:
        raised: with its traceback.
        file: whose lines are preferred to those of other files.

    Returns:
        None where it passed through code of libraries alone.
    """
    if isinstance(raised, SyntaxError) and raised.filename:
        return f"{_short(raised.filename)}:{raised.lineno}"
    libraries = (f"{Path(__file__).resolve().parents[1]}{os.sep}", f"{sysconfig.get_path('stdlib')}{os.sep}")
    theirs = [
        frame
        for frame in traceback.extract_tb(raised.__traceback__)
        if not frame.filename.startswith("<")
        and not os.path.abspath(frame.filename).startswith(libraries)
        and not {"site-packages", "dist-packages"} & set(Path(frame.filename).parts)
    ]
    own = [one for one in theirs if file is not None and os.path.abspath(one.filename) == os.path.abspath(file)]
    found = next((some[-1] for some in (own, theirs) if some), None)
    return None if found is None else f"{_short(found.filename)}:{found.lineno}"


def _short(file: str | None) -> str:
    """A path as people read it: relative where it is below the current directory."""
    if file is None:
        return "built in"
    path = Path(os.path.abspath(file))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def described(made: Any) -> str:
    """What a function returned, for the message that says that it is something else."""
    if made is None:
        return "None (a return may be missing)"
    return f"the class {made.__name__}" if isinstance(made, type) else f"an object of type {type(made).__name__}"
