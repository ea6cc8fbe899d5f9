"""The command that every process of a job runs, checked before a scheduler sees it. No jax here."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config import Loaded, load_config
from jaxtrain.config.files import is_shipped
from jaxtrain.config.secrets import redacted_words
from jaxtrain.errors import ConfigError
from jaxtrain.layout.degrees import config_degrees, resolve_degrees
from jaxtrain.parallel.division import check_rows, step_microbatches
from jaxtrain.run.folder import folder_of


@dataclass(frozen=True)
class Training:
    """A training whose config was checked.

    Attributes:
        words: `train` and what follows it; the same for every process and at every start.
        loaded: the config.
        run_dir: directory of the run, absolute: the same at every start, so that a start goes on from the last.
    """

    words: tuple[str, ...]
    loaded: Loaded
    run_dir: Path


def checked_training(
    config: str,
    overrides: Sequence[str],
    *,
    run_dir: str | None = None,
    emulate: int | None = None,
    num_devices: int | None = None,
) -> Training:
    """Check a config for the devices that a job will have.

    Args:
        config: a shipped name, a YAML file or the directory of a run.
        overrides: `key=value` settings that replace those of the config.
        run_dir: directory of the run; None: runs/<name>, or the run that the config is of.
        emulate: number of CPU devices that each process emulates; None: the devices of the machine.
        num_devices: devices of all processes together; None: not known, and degrees are not compared with it.

    Returns:
        The command, with absolute paths in place of relative ones for config and run directory. Paths inside the config
        stay as they are: they are relative to the folder in which the command runs.

    Raises:
        ConfigError: the config is wrong, its degrees or its batch do not fit the devices, or a setting holds a secret.
    """
    loaded = load_config(config, overrides=overrides, weights=False)
    hidden = next((word for word in overrides if redacted_words([word]) != [word]), None)
    if hidden is not None:
        raise ConfigError(
            f"{hidden.partition('=')[0]} holds a secret, which the script would show; put it into the environment, or "
            "into the config file"
        )
    if num_devices is not None:
        check_devices(loaded, num_devices)
    folder = folder_of(loaded, run_dir).absolute()
    place = config if is_shipped(config) else os.path.abspath(config)
    options = [] if emulate is None else ["--emulate", str(emulate)]
    return Training(("train", place, *overrides, *options, "--run-dir", str(folder)), loaded, folder)


def check_devices(loaded: Loaded, num_devices: int) -> None:
    """Raise where the degrees or the batch of a config do not fit the devices of all processes.

    Args:
        loaded: the config.
        num_devices: devices of all processes together.

    Raises:
        ConfigError: the line that `train` would end with.
    """
    config = loaded.config
    if config.parallel.auto:
        return
    degrees = resolve_degrees(config_degrees(config.parallel), num_devices)
    microbatches = step_microbatches(config.parallel, degrees["pipe"], config.train.accumulation_steps)
    name = "accumulation_steps" if degrees["pipe"] == 1 else "microbatches"
    check_rows(config.train.global_batch_size, degrees, {name: microbatches})


def check_text(text: str | None, *, option: str) -> None:
    """Check a value that stands on one line of a script.

    Raises:
        ConfigError: it is empty, or holds a line break or another control character.
    """
    if text is not None and (not text.strip() or not text.isprintable()):
        raise ConfigError(f"{option} {text!r} is empty or holds a line break; write it on one line, or leave it out")
