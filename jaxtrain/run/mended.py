"""Writes the run.json of a run again where it is damaged, from what its newest intact checkpoint says. No jax here."""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.directory import DamagedError, live_steps, read_info
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.config.files import RUN_FILE
from jaxtrain.errors import CheckpointError
from jaxtrain.runtime.files import put_aside, write_json_atomic
from jaxtrain.runtime.terminal import print_remark

# What a checkpoint keeps of run.json beside what it needs itself.
_KEPT = (
    *("created", "resumed_after", "model", "data", "task", "task_is_shipped", "parameters"),
    *("published", "mesh"),
)
_OWN = ("name", "config", "from_python", "called", "base", "rolled_back", "evaluated_rows")


def kept_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a checkpoint keeps of the content of run.json, so that it can be written again from it."""
    return {key: info[key] for key in _KEPT if key in info}


def mend_run(run_dir: str | Path | None, report: Callable[[str], None] = print_remark) -> None:
    """Writes run.json again where it is damaged or gone and a checkpoint is intact, and says so.

    What cannot be mended is left as it is: who reads it says what is wrong.

    Args:
        run_dir: What may be the directory of a run; nothing happens where it is none.
        report: Called with one line.
    """
    # Of `os`, since a path that no file system takes is no folder either, and who reads it says what is wrong with it.
    if run_dir is None or not os.path.isdir(run_dir):
        return
    folder = Path(run_dir)
    path = folder / RUN_FILE
    reason = _damage(path)
    if reason is None:
        return
    try:
        found = _rebuilt(folder, live_steps(checkpoint_folder(folder)))
        if found is None:
            return
        step, info = found
        if put_aside(path) is None and path.exists():
            path.rename(path.with_name(f"{RUN_FILE}.damaged-{time.strftime('%Y%m%dT%H%M%S')}"))
        write_json_atomic(path, info)
    except (OSError, CheckpointError):
        return
    report(f"{path} {reason}: it was written again from the checkpoint of step {step}")


def _damage(path: Path) -> str | None:
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "is gone"
    except IsADirectoryError:
        return "is a folder"
    except OSError:
        return None  # it cannot be opened, and may be whole
    except (ValueError, RecursionError):
        return "is damaged"
    return None if isinstance(info, dict) and isinstance(info.get("config"), dict) else "is damaged"


def _rebuilt(folder: Path, steps: Iterable[int]) -> tuple[int, dict[str, Any]] | None:
    """The newest step whose record says what the run is, and a run.json made of it."""
    for step in sorted(steps, reverse=True):
        try:
            metadata = read_info(checkpoint_folder(folder), step).metadata
        except DamagedError:
            continue
        config = metadata.get("config")
        if not isinstance(config, dict):
            continue
        kept = metadata.get("run")
        is_done = step >= (config.get("train") or {}).get("steps", 0)
        return step, {
            **(kept if isinstance(kept, dict) else {}),
            **{key: metadata[key] for key in _OWN if key in metadata},
            "status": "done" if is_done else "stopped",
            "finished": None,
            "final": {},
        }
    return None
