"""The key `from` of a model group: a published model that gives the model's keys and its first weights."""

import copy
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model

from jaxtrain.config.base import Group
from jaxtrain.config.local_path import local_path
from jaxtrain.errors import ConfigError
from jaxtrain.published.config_file import config_origin, read_published_config
from jaxtrain.published.families.table import family_of, read_settings
from jaxtrain.published.family import Family

if TYPE_CHECKING:

    class Published(Group):
        """Groups of models that are published."""

else:
    _DOC = "Published folder, .gguf file or id on the hub: gives keys that are not set, and first weights; null: none."
    # `from` is a word of the language, so that a class body cannot hold it.
    Published = create_model(
        "Published", __base__=Group, **{"from": (str | None, Field(default=None, description=_DOC))}
    )


def published_from(model: Group) -> str | None:
    """Returns the published model that a model group starts from, or None."""
    return getattr(model, "from", None)


@functools.lru_cache(maxsize=8)
def _read(path: str, stamp: float) -> tuple[Family, dict[str, Any]]:
    config = read_published_config(Path(path))
    try:
        return family_of(config.get("model_type")), read_settings(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def published_settings(path: str) -> dict[str, Any]:
    """Returns the keys of a model group that a published model gives.

    Args:
        path: Its folder, or its .gguf file.

    Raises:
        ConfigError: There is none, or a key or value of its config.json is not supported.
    """
    # A copy, because the loader merges other keys into the groups inside.
    return copy.deepcopy(_read(path, _stamp(path))[1])


def published_family(path: str) -> Family:
    """Returns the family of a published model.

    Args:
        path: Its folder, or its .gguf file.

    Raises:
        ConfigError: There is none, or a key or value of its config.json is not supported.
    """
    return _read(path, _stamp(path))[0]


def _stamp(path: str) -> float:
    place = config_origin(local_path(path, what="model.from"))
    return place.stat().st_mtime if place.is_file() else 0.0
