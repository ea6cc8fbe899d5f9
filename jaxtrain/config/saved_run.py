"""The record of a run, `run.json`, read where the directory of a run is given. No jax here."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.local_path import local_path
from jaxtrain.errors import ConfigError
from jaxtrain.published.json_text import parse_json

RUN_FILE = "run.json"
# Settings of the group `optimizer` that hold beside an optimizer from Python.
_BESIDE_OPTIMIZER = ("clip_norm", "ema_decay", "freeze", "offload")


def read_run(run_dir: str | Path) -> dict[str, Any]:
    """Returns the content of a run's `run.json`.

    Args:
        run_dir: Directory of the run.

    Raises:
        ConfigError: The path is not the directory of a run.
    """
    path = local_path(run_dir, what="run directory")
    if not path.exists():
        raise ConfigError(f"no run at {path}; give the directory of a run, with its run.json (runs/<name>)")
    if not path.is_dir():
        raise ConfigError(f"{path} is a file; give the directory of a run, with its run.json (runs/<name>)")
    try:
        info = parse_json((path / RUN_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        parent = path.resolve().parent
        near = f"; did you mean {parent}?" if (parent / RUN_FILE).is_file() else _import_of(path)
        raise ConfigError(f"{path} is not a run: it has no run.json{near}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path / RUN_FILE}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path / RUN_FILE} is not JSON; it was not written by jaxtrain, or is damaged") from None
    if not isinstance(info, dict) or not isinstance(info.get("config"), dict):
        raise ConfigError(f"{path / RUN_FILE} holds no config; it was not written by jaxtrain")
    return info


def _import_of(path: Path) -> str:
    """How a run is made of what a folder holds; empty: it holds no model."""
    if (path / "adapter_config.json").is_file():
        return f"; make one of this adapter: jaxtrain import {path} --base FOLDER -o RUN_DIR"
    if (path / "config.json").is_file():
        return f"; make one of this published model: jaxtrain import {path} -o RUN_DIR"
    return ""


def is_run(path: Path) -> bool:
    """Returns whether a path is the directory of a run."""
    return path.is_dir() and (path / RUN_FILE).is_file()


def recorded_parts(record: Mapping[str, Any]) -> dict[str, str | None]:
    """Returns what `run.json` or the metadata of a checkpoint says of the parts that came from Python.

    Args:
        record: The content of `run.json`, or the metadata.

    Returns:
        `model`, `task`, `data` and `optimizer`, each with the name of what was passed in; None: the config's.
    """
    found = record.get("from_python") or {}
    return {part: found.get(part) for part in ("model", "task", "data", "optimizer")}


def is_replaced(key: str, parts: Collection[str]) -> bool:
    """Whether a setting says nothing, since the part that it describes came from Python.

    Args:
        key: Dotted.
        parts: Those that came from Python: `model`, `task`, `data` or `optimizer`.
    """
    group, _, rest = key.partition(".")
    if group == "optimizer" and rest.split(".")[0] in _BESIDE_OPTIMIZER:
        return False
    return group in parts or (group == "loss" and "task" in parts)
