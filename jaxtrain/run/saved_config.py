"""The config of a saved run, for the machine that opens it."""

import contextlib
import glob
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import Config, Loaded, load_config
from jaxtrain.config.arguments import local_path
from jaxtrain.config.files import read_run
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.run.directory import mend_run
from jaxtrain.run.tokenizer import tokenizer_file


def saved_config(run_dir: str | Path, *, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Loaded:
    """The config of a run for this machine.

    The saved degrees (and kernels) say how the run was trained, not what is here, so `data` takes all devices unless an
    override says otherwise. Text is read with the tokenizer that was saved with the run: another one, trained on other
    text, would give the ids other meanings.

    Args:
        run_dir: directory of the run.
        overrides: `key=value` strings, or a mapping of keys, on top.

    Raises:
        ConfigError: not a run, or a wrong key or value.
    """
    run_dir = local_path(run_dir, what="run directory")
    mend_run(run_dir)
    info = read_run(run_dir)
    saved = dict(info["config"])
    parallel = saved.get("parallel")
    if isinstance(parallel, dict):
        saved["parallel"] = {key: value for key, value in parallel.items() if key == "max_replicated_fraction"}
    # What computes attention and how logits are chunked was for the hardware of the run; neither changes a number.
    # The keys that a published model gave are saved too, and its folder may have moved, changed or gone.
    for group, keys in (("model", ("attention", "from")), ("loss", ("logits", "block"))):
        if isinstance(saved.get(group), dict):
            saved[group] = {key: value for key, value in saved[group].items() if key not in keys}
    changed = changed_keys(overrides)
    words = [] if isinstance(overrides, Mapping) else list(overrides)
    keywords = dict(overrides) if isinstance(overrides, Mapping) else {}
    loaded = load_config(saved, overrides=words, keywords=keywords, origin="run.json")
    if "data.validation_path" not in changed:
        _check_path(saved.get("data") or {}, loaded.config)
    chose_tokenizer = any(key.startswith("data.tokenizer") for key in changed)
    takes_tokenizer = hasattr(loaded.config.data, "tokenizer") and not chose_tokenizer
    tokenizer = None
    if takes_tokenizer:
        # Who needs the tokenizer hears of it; curves and numbers can be had without one.
        with contextlib.suppress(DataError):
            tokenizer = tokenizer_file(run_dir, info)
    if tokenizer is not None:
        keywords = {**keywords, "data.tokenizer.kind": "file", "data.tokenizer.path": str(tokenizer)}
        loaded = load_config(saved, overrides=words, keywords=keywords, origin="run.json")
    return loaded


def _check_path(saved: Mapping[str, Any], opened: Config) -> None:
    """Raise where other rows are given as those for training, so that the run's held-out ones would be evaluated."""
    data = opened.data.model_dump()
    held_out, path = data.get("validation_path"), data.get("path")
    before = saved.get("path")
    if held_out is None or held_out != saved.get("validation_path") or _place(path) == _place(before):
        return
    if isinstance(before, str) and "://" not in before and not glob.glob(os.path.expanduser(before)):
        return  # The file for training, which is read with the held-out ones, has moved.
    shown = path if isinstance(path, str) else ",".join(path or ())
    raise ConfigError(
        f"data.path={shown} would not be evaluated: the held-out rows of the run are those of data.validation_path="
        f"{held_out} (run.json); give data.validation_path={shown}"
    )


def trained_rows_line(saved: Config, opened: Config) -> str | None:
    """What to say where held-out rows of an opened run were trained on; None: nothing says that they were.

    Args:
        saved: the config of the run.
        opened: the same with overrides.
    """
    of_run = _sources(saved)
    for now in (source for source in _sources(opened) if source not in of_run):
        for then in of_run:
            line = _trained_on(then, now)
            if line is not None:
                return f"data.components: {line}" if opened.data.kind == "mixture" else f"data.{line}"
    return None


def _sources(config: Config) -> list[dict[str, Any]]:
    """The keys of the data, or of each source of a mixture."""
    data = config.data.model_dump()
    return [one["source"] for one in data["components"]] if data["kind"] == "mixture" else [data]


def _trained_on(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What to say of a source whose held-out rows are those of a source of the run, and more of them."""
    name, by_path = "validation_fraction", now.get("validation_path") is not None
    if then.get(name) is None or now.get(name) is None:
        return None
    place = now["validation_path"] if by_path else now.get("path")
    if _rows_of(then, then.get("path")) != _rows_of(now, place):
        return None
    was_apart = then.get("validation_path") is not None
    of_run, of_now = 0.0 if was_apart else then[name], 1.0 if by_path else now[name]
    if of_now <= of_run or (by_path and was_apart and _place(then["validation_path"]) == _place(place)):
        return None
    better = "and look better than new ones"
    if by_path or was_apart:
        given = f"validation_path={place}" if by_path else f"validation_path={now.get('validation_path') or 'null'}"
        return f"{given}: the run was trained on rows of {place or 'these'}, which are evaluated here {better}"
    return (
        f"{name}={of_now:g} holds out more than the run did ({of_run:g}): some of these rows were trained on, "
        f"{better}; leave it out, or give other data"
    )


def _rows_of(source: Mapping[str, Any], path: Any) -> list[Any]:
    """What says which rows there are in a path of a source; other keys say how they are read."""
    return [source["kind"], _place(path), source.get("builtin") if path is None else None]


def _place(path: Any) -> Any:
    """A path, or several, in one form."""
    if isinstance(path, str):
        return os.path.realpath(os.path.expanduser(path))
    return [_place(one) for one in path] if isinstance(path, list | tuple) else path


def changed_keys(overrides: Iterable[str] | Mapping[str, Any]) -> list[str]:
    """The dotted keys that overrides set.

    Args:
        overrides: `key=value` strings, or a mapping of keys, nested or dotted.
    """
    if isinstance(overrides, Mapping):
        return list(_dotted(overrides))
    return [override.removeprefix("--").partition("=")[0] for override in overrides]


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
