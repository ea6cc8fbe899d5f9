"""What the processes of a run must have in common before they compile: config, code, versions, devices, data."""

import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import Loaded
from jaxtrain.config.secrets import redacted
from jaxtrain.metrics.runinfo import git_state, package_versions
from jaxtrain.runtime.agreement import Facts, check_devices, together
from jaxtrain.train.assemble import Run

# What a process may have of its own: where it finds and keeps files, what its host does ahead, and what only process 0
# writes. Whether data at another path is the same data is told by its content.
MAY_DIFFER = (
    "compilation_cache",
    "data.path",
    "data.validation_path",
    "data.tokenizer.path",
    "train.prefetch",
    "train.workers",
    "logging.every",
    "logging.tensorboard",
    "logging.wandb",
    "logging.trackio",
    "logging.mlflow",
    "logging.project",
    "logging.tags",
)
_JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
)


def agree_on_start(loaded: Loaded, run_dir: Path, *, resume: str | None) -> None:
    """Compare config, code, versions and devices of all processes; nothing happens where there is only one.

    Args:
        loaded: the config.
        run_dir: directory of the run.
        resume: how the run is resumed.

    Raises:
        ConfigError: in every process, where they differ; names each key with both values.
    """
    if jax.process_count() == 1:
        return
    check_devices()
    together(lambda: None, says=lambda _: _start_facts(loaded, run_dir, resume))


def run_facts(run: Run) -> Facts:
    """What identifies the rows of each batch, and the options that the compiler of each process was found to accept."""
    options = run.step.compiler_options
    found = {f"data ({name})": (str(value), "") for name, value in flat(run.stream).items()}
    # A fact each, since what is told of a fact is cut and names are long.
    return found | {
        f"compiler option {name}": (str(value), "") for name, value in {**options.used, **options.tried}.items()
    }


def _start_facts(loaded: Loaded, run_dir: Path, resume: str | None) -> Facts:
    # Both values of what differs are shown, and a secret that differs between hosts trains the same.
    config = flat(redacted(loaded.config.model_dump(mode="json")))
    facts = {key: (str(value), loaded.origins.get(key, "")) for key, value in config.items() if not _may_differ(key)}
    versions = {f"version of {package}": (str(version), "") for package, version in package_versions().items()}
    settings = {name: jax.config.values[name] for name in _JAX_SETTINGS}
    return {
        **facts,
        **versions,
        **{name: (str(value), "") for name, value in settings.items()},
        "directory of the run": (str(run_dir), ""),
        "--resume": (str(resume), ""),
        "code of jaxtrain (SHA-256)": (package_digest()[:16], ""),
        "git commit": (str(git_state(Path())[0]), ""),
        "XLA_FLAGS": (" ".join(sorted(os.environ.get("XLA_FLAGS", "").split())), ""),
    }


@functools.cache
def package_digest() -> str:
    """SHA-256 over every Python file of the package, with its place in it."""
    folder = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _may_differ(key: str) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in MAY_DIFFER)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found
