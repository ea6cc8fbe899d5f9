"""Our model group as families read it: plain values, with every size filled in. No jax here."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.base import Group
from jaxtrain.config.encoder_decoder import EncoderDecoderConfig
from jaxtrain.config.models import TransformerConfig
from jaxtrain.config.vit import ViTConfig
from jaxtrain.errors import ConfigError
from jaxtrain.published.families.table import FAMILIES
from jaxtrain.published.family import Family

_PUBLISHED_KINDS = ("transformer", "encoder_decoder", "vit", "resnet")
# What a published config does not say, or what changes how outputs are computed but not what they are.
_NOT_COMPARED = ("size", "from", "attention", "dropout")


def settings_of(model: Group, *, vocab_size: int | None = None) -> dict[str, Any]:
    """Returns the keys of a model group as plain values, with the sizes that follow from others filled in.

    Args:
        model: The model group of a config.
        vocab_size: Vocabulary of the data, where the config leaves it to the data.
    """
    settings = model.model_dump()
    if isinstance(model, EncoderDecoderConfig):
        settings |= dict(num_decoder_layers=model.decoder_layers)
    if isinstance(model, TransformerConfig | EncoderDecoderConfig):
        settings |= dict(num_kv_heads=model.kv_heads, head_dim=model.head_width, mlp_dim=model.mlp_width)
    if isinstance(model, ViTConfig):
        settings |= dict(mlp_dim=model.mlp_width)
    if "vocab_size" in settings and settings["vocab_size"] is None:
        settings["vocab_size"] = vocab_size
    return settings


def parse_settings(settings: Mapping[str, Any]) -> Group:
    """Returns the model group of a family's settings."""
    from pydantic import TypeAdapter

    from jaxtrain.config.models import ModelConfig

    return TypeAdapter(ModelConfig).validate_python(dict(settings))


def settings_in(path: object, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every key of the model group of a published model, with its sizes filled in.

    Args:
        path: The published model, for the message.
        settings: Keys of our model group, as its family reads them.

    Raises:
        ConfigError: A value does not fit our model group.
    """
    from pydantic import ValidationError

    try:
        return settings_of(parse_settings(settings))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][1:])
        raise ConfigError(f"the config.json of {path} gives model.{key}={first['input']}: {first['msg']}") from None


def unsaid(family: Family, settings: Mapping[str, Any]) -> str | None:
    """Returns the first key of our model group whose value a config.json of the family cannot say, or None.

    Args:
        family: The family.
        settings: From `settings_of`.
    """
    from pydantic import ValidationError

    try:
        again = settings_of(parse_settings(family.from_published(family.to_published(settings))))
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
