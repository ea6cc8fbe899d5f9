"""The command that every process of a job runs, checked before a scheduler sees it. No jax here."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtrain.config import Loaded, find_config, load_config
from jaxtrain.config.files import read_yaml, shipped_configs
from jaxtrain.config.secrets import redacted, redacted_keys, redacted_text, redacted_words
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import config_degrees, resolve_degrees
from jaxtrain.parallel.division import check_batch
from jaxtrain.run.directory import folder_of, run_folder

# Where the pods find the file of a config.
CONFIG_FOLDER = "/etc/jaxtrain"


@dataclass(frozen=True)
class Training:
    """A training whose config was checked.

    Attributes:
        words: `train` and what follows it; the same for every process and at every start.
        name: of the run.
        run_dir: directory of the run: the same at every start, so that a start goes on from the last.
        config_file: name and text of the config, for pods; None: a shipped one, or no pods.
    """

    words: tuple[str, ...]
    name: str
    run_dir: str
    config_file: tuple[str, str] | None = None


def job_training(
    config: str, overrides: Sequence[str], *, run_dir: str | None, emulate: int | None, num_devices: int | None
) -> Training:
    """Check a training whose processes see the files of this machine.

    Args:
        config: a shipped name, a YAML file or the directory of a run.
        overrides: `key=value` settings that replace those of the config.
        run_dir: directory of the run; None: runs/<name>, or the run that the config is of.
        emulate: number of CPU devices that each process emulates; None: the devices of the machine.
        num_devices: devices of all processes together; None: not known, and degrees are not compared with it.

    Returns:
        The command, with absolute paths in place of relative ones for config and run directory.

    Raises:
        ConfigError: the config is wrong, its degrees or its batch do not fit the devices, or a setting holds a secret.
    """
    loaded = _checked(config, overrides, num_devices)
    folder = folder_of(loaded, run_dir).absolute()
    place = config if config in shipped_configs() else os.path.abspath(config)
    options = [] if emulate is None else ["--emulate", str(emulate)]
    return Training(("train", place, *overrides, *options, "--run-dir", str(folder)), loaded.name, str(folder))


def pod_training(
    config: str, overrides: Sequence[str], *, run_dir: str | None, folder: str, num_devices: int
) -> Training:
    """Check a training whose processes see the files of an image and of volumes.

    Args:
        config: a shipped name or a YAML file; the pods get the file.
        overrides: `key=value` settings that replace those of the config.
        run_dir: directory of the run in the pods; None: a folder of the config's name.
        folder: where that folder lies.
        num_devices: devices of all pods together.

    Raises:
        ConfigError: the config is wrong, does not fit the devices, is the directory of a run, or holds a secret.
    """
    loaded = _checked(config, overrides, num_devices)
    if loaded.run_dir is not None:
        raise ConfigError(f"CONFIG {config} is a run on this machine; name a shipped config or a YAML file")
    run_folder(run_dir, loaded.name)
    place = config
    file = None
    if config not in shipped_configs():
        path = find_config(config)
        text = path.read_text(encoding="utf-8")
        # The pods get the whole file, with its comments and with what the command line replaces.
        if redacted_text(text) != text or redacted_keys(redacted(read_yaml(path)[0])):
            raise ConfigError(_secret(config))
        # Keys of a ConfigMap take no other characters.
        file = re.sub(r"[^-._a-zA-Z0-9]", "-", path.name), text
        place = f"{CONFIG_FOLDER}/{file[0]}"
    directory = run_dir or f"{folder}/{loaded.name}"
    return Training(("train", place, *overrides, "--run-dir", directory), loaded.name, directory, file)


def _checked(config: str, overrides: Sequence[str], num_devices: int | None) -> Loaded:
    loaded = load_config(config, overrides=overrides, weights=False)
    for word in overrides:
        if redacted_words([word]) != [word]:
            raise ConfigError(_secret(word.partition("=")[0]))
    parallel = loaded.config.parallel
    if num_devices is not None and not parallel.auto:
        check_batch(loaded.config, resolve_degrees(config_degrees(parallel), num_devices))
    return loaded


def _secret(place: str) -> str:
    return f"{place} holds a secret, which would be shown; read it from the environment (on Kubernetes: --secret NAME)"
