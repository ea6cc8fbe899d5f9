"""Our model group as families read it, and the family that can say it. No jax here."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.filled import parse_settings, settings_in, settings_of
from jaxtrain.errors import ConfigError
from jaxtrain.published.families.table import FAMILIES, read_settings
from jaxtrain.published.family import Family

__all__ = ["family_for", "parse_settings", "settings_in", "settings_of", "unsaid"]

_PUBLISHED_KINDS = ("transformer", "encoder_decoder", "vit", "resnet")
# What a published config does not say, or what changes how outputs are computed but not what they are.
_NOT_COMPARED = ("size", "from", "attention", "dropout")


def unsaid(family: Family, settings: Mapping[str, Any]) -> str | None:
    """Returns the first key of our model group whose value a config.json of the family cannot say, or None.

    Args:
        family: The family.
        settings: From `settings_of`.
    """
    from pydantic import ValidationError

    try:
        written = {**family.to_published(settings), "model_type": family.model_type}
        again = settings_of(parse_settings(read_settings(written)))
    except (ConfigError, KeyError) as error:
        return str(error)
    except ValidationError as error:  # what it can say of the model does not fit together
        return str(error.errors()[0]["msg"])
    for key, value in settings.items():
        if key not in _NOT_COMPARED and (key not in again or again[key] != value):
            return f"model.{key}={value}"
    return None


def family_for(settings: Mapping[str, Any], *, model_type: str | None = None) -> Family:
    """Returns the family that a model is written as: the one it came from, else the first that can say all of it.

    Args:
        settings: From `settings_of`.
        model_type: That of the folder that the model came from, or None.

    Raises:
        ConfigError: No family can say it; names what the nearest cannot.
    """
    if settings.get("kind") not in _PUBLISHED_KINDS:
        raise ConfigError(
            f"model.kind={settings.get('kind')} is of no published family, so it cannot be written as one"
        )
    if settings.get("vocab_size", 0) is None:
        raise ConfigError(
            "model.vocab_size is null, which leaves it to data; write the number of rows of the embedding"
        )
    if model_type is not None and model_type in FAMILIES:
        problem = unsaid(FAMILIES[model_type], settings)
        if problem is not None:
            raise ConfigError(f"the family {model_type}, which the model came from, cannot say {problem}")
        return FAMILIES[model_type]
    problems = {}
    for name, family in FAMILIES.items():
        problems[name] = unsaid(family, settings)
        if problems[name] is None:
            return family
    said = "; ".join(f"{name} cannot say {problem}" for name, problem in list(problems.items())[:3])
    raise ConfigError(f"no published family has this model: {said}")
