"""The content of `run.json`: what ran, on which devices and with which versions."""

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.directory import list_steps
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.config.schema import Config
from jaxtrain.config.secrets import redacted, redacted_words
from jaxtrain.metrics.history import last_metrics
from jaxtrain.runtime.files import strict_json

PACKAGES = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def run_info(
    config: Config,
    *,
    name: str,
    mesh_shape: Mapping[str, int],
    model: Mapping[str, object],
    data: Mapping[str, object],
) -> dict[str, Any]:
    """Make the content of `run.json` at the start of a run, in strict JSON values, with status `running`.

    No environment variables, which may hold keys and tokens; what looks like one in the command or the config is not
    shown. `model` has `name` and `num_parameters`, `data` `description` (lines of text), `fingerprint` and so on.
    """
    import jax

    devices = jax.devices()
    commit, dirty = git_state(Path())  # no path in full: the current folder may have been deleted
    return strict_json(
        {
            "name": name,
            "status": "running",
            "created": _timestamp(),
            "finished": None,
            "final": {},
            "command": redacted_words(sys.argv),
            "model": dict(model),
            "data": dict(data),
            "mesh": dict(mesh_shape),
            "devices": {
                "platform": devices[0].platform,
                "kind": devices[0].device_kind,
                "count": len(devices),
                "process_count": jax.process_count(),
            },
            "host": {"name": platform.node(), "system": platform.platform(), "cpu_count": os.cpu_count()},
            "versions": package_versions(),
            "git_commit": commit,
            "git_dirty": dirty,
            "config": redacted(config.model_dump(mode="json")),
        }
    )


def finished_info(info: Mapping[str, object], *, status: str, final: Mapping[str, object]) -> dict[str, Any]:
    """Make the content of `run.json` at the end of a run: how it ended, such as `done`, and its last metrics."""
    return strict_json({**info, "status": status, "finished": _timestamp(), "final": dict(final)})


def package_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Read the versions of Python and of packages without importing them; a missing package has None."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def git_state(directory: Path) -> tuple[str | None, bool | None]:
    """The commit that is checked out, and whether tracked files differ from it; None outside a git repository."""
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    changes = None if commit is None else _git(directory, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _git(directory: Path, *arguments: str) -> str | None:
    # Without optional locks `git status` cannot block a commit that somebody makes at the same moment.
    command = ["git", "--no-optional-locks", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2.0, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def run_text(run_dir: Path) -> str:
    """A run in a few lines: state, model, last metrics, checkpoints; files that are missing leave out their part."""
    info = read_run_info(run_dir)
    steps, model = info.get("config", {}).get("train", {}).get("steps"), info.get("model")
    found = last_metrics(run_dir / "metrics.jsonl", ("loss", "accuracy", "learning_rate"))
    if math.isnan(found.get("learning_rate", 0)):  # of an optimizer from Python
        del found["learning_rate"]
    lines = [
        f"{run_dir}: {info.get('status') or 'no run.json'}{'' if steps is None else f' ({steps:,} steps)'}",
        f"{model['name']}, {model['num_parameters']:,} parameters" if model else "",
        ", ".join(f"{name} {value:.5g}" for name, value in found.items()),
        f"checkpoints: {', '.join(map(str, list_steps(checkpoint_folder(run_dir))[-5:])) or 'none'}",
    ]
    return "\n  ".join(line for line in lines if line)


def read_run_info(run_dir: Path) -> dict[str, Any]:
    """Read the run.json of a run; empty where it is missing or damaged: what a resume needs is in the checkpoint."""
    try:
        found = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
