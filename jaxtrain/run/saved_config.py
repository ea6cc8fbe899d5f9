"""The config of a saved run, for the machine that opens it."""

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import Config, Loaded, load_config
from jaxtrain.config.local_path import local_path
from jaxtrain.config.saved_run import read_run
from jaxtrain.errors import DataError
from jaxtrain.run.kept_tokenizer import tokenizer_file
from jaxtrain.run.mended import mend_run


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
    words = [] if isinstance(overrides, Mapping) else list(overrides)
    keywords = dict(overrides) if isinstance(overrides, Mapping) else {}
    loaded = load_config(saved, overrides=words, keywords=keywords, origin="run.json")
    chose_tokenizer = any(key.startswith("data.tokenizer") for key in changed_keys(overrides))
    takes_tokenizer = hasattr(loaded.config.data, "tokenizer") and not chose_tokenizer
    tokenizer = None
    if takes_tokenizer:
        # Who needs the tokenizer hears of it; curves and numbers can be had without one.
        with contextlib.suppress(DataError):
            tokenizer = tokenizer_file(run_dir, info, lambda line: None)
    if tokenizer is not None:
        keywords = {**keywords, "data.tokenizer.kind": "file", "data.tokenizer.path": str(tokenizer)}
        loaded = load_config(saved, overrides=words, keywords=keywords, origin="run.json")
    return loaded


def trained_rows_line(saved: Config, opened: Config) -> str | None:
    """What to say where held-out rows of an opened run were trained on; None: nothing says that they were.

    Args:
        saved: the config of the run.
        opened: the same with overrides.
    """
    name = "validation_fraction"
    before, after = saved.data.model_dump(), opened.data.model_dump()
    of_run, of_now = before.get(name), after.get(name)
    if of_run is None or of_now is None or of_now <= of_run or after.get("validation_path") is not None:
        return None
    # What says which rows there are; other keys say how they are read.
    for key in ("kind", "path", "builtin", "call", "args", "components"):
        values = [one.get(key) for one in (before, after)]
        if key == "path":
            values = [Path(value).resolve() if isinstance(value, str) else value for value in values]
        if values[0] != values[1]:
            return None
    return (
        f"data.{name}={of_now:g} holds out more than the run did ({of_run:g}): some of these rows were trained on, and "
        f"look better than new ones; leave it out, or give other data"
    )


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
