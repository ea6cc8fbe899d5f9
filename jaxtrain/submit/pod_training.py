"""The command that every pod runs, checked before a cluster sees it. No jax here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config import Loaded, find_config, load_config
from jaxtrain.config.files import is_shipped, read_yaml
from jaxtrain.config.secrets import redacted, redacted_keys, redacted_text, redacted_words
from jaxtrain.errors import ConfigError
from jaxtrain.run.folder import run_folder
from jaxtrain.submit.kubernetes import CONFIG_FOLDER, check_config_file


@dataclass(frozen=True)
class PodTraining:
    """A training whose config was checked, as the pods run it.

    Attributes:
        words: Arguments of `jaxtrain`, the same in every pod and at every start.
        loaded: The config.
        run_dir: Directory of the run in the pods: the same at every start, so that a start goes on from the last.
        config_file: Name and text of the config; None: a shipped one, which the image has.
    """

    words: tuple[str, ...]
    loaded: Loaded
    run_dir: str
    config_file: tuple[str, str] | None


def pod_training(config: str, overrides: Sequence[str], *, run_dir: str | None, folder: str | None) -> PodTraining:
    """Checks a config, and returns the command of the pods.

    Args:
        config: A shipped name or a YAML file; the pods get the file.
        overrides: `key=value` settings that replace those of the config.
        run_dir: Directory of the run in the pods; None: a folder of the config's name.
        folder: Where that folder lies; None: in the working directory of the image.

    Raises:
        ConfigError: The config is wrong, is the directory of a run, or holds a secret.
    """
    loaded = load_config(config, overrides=overrides, weights=False)
    if loaded.run_dir is not None:
        raise ConfigError(
            f"CONFIG {config} is the directory of a run on this machine, which the pods do not have; name a shipped "
            "config or a YAML file, and the directory of the run in the pods with --run-dir"
        )
    path = None if is_shipped(config) else find_config(config)
    secret = next(iter(redacted_keys(redacted(loaded.config.model_dump(mode="json")))), None)
    if secret is None and redacted_words(list(overrides)) != list(overrides):
        secret = "the command line"
    # The pods get the whole file: with its comments, and with what the command line replaces.
    if secret is None and path is not None and _holds_secret(path):
        secret = config
    if secret is not None:
        raise ConfigError(
            f"{secret} holds a secret, which a manifest would show; put it into a Secret of the cluster, write "
            "--secret with its name, and read it from the environment"
        )
    place, file = config, None
    if path is not None:
        file = check_config_file(path.name, path.read_text(encoding="utf-8"))
        place = f"{CONFIG_FOLDER}/{file[0]}"
    run_folder(run_dir, loaded.name)
    directory = run_dir or f"{folder or 'runs'}/{loaded.name}"
    return PodTraining(("train", place, *overrides, "--run-dir", directory), loaded, directory, file)


def _holds_secret(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return redacted_text(text) != text or bool(redacted_keys(redacted(read_yaml(path)[0])))
