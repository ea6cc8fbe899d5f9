"""The published families: one row each, by the `model_type` of their config.json. No jax here."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.published.families import (
    bert,
    distilbert,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    llama,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    resnet,
    roberta,
    starcoder2,
    t5,
    vit,
)
from jaxtrain.published.family import Family

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "mixtral": mixtral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3_text": gemma3.FAMILY,
    "gemma3": gemma3.IMAGES_FAMILY,
    "phi3": phi3.FAMILY,
    "gpt2": gpt2.FAMILY,
    "gpt_neox": gpt_neox.FAMILY,
    "bert": bert.FAMILY,
    "roberta": roberta.FAMILY,
    "distilbert": distilbert.FAMILY,
    "vit": vit.FAMILY,
    "resnet": resnet.FAMILY,
    "t5": t5.FAMILY,
    "starcoder2": starcoder2.FAMILY,
}


def family_of(model_type: object) -> Family:
    """Returns the family of a config.json's model_type.

    Raises:
        ConfigError: If there is none.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"config.json has model_type: {model_type}; the known ones are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for the object in a config.json, which may hold anything.

    Raises:
        ConfigError: If its family is not known, or a key or a value of it is not supported.
    """
    family = family_of(config.get("model_type"))
    try:
        settings = family.from_published(config)
        nothing = next((key for key in _NEVER_NULL if key in settings and settings[key] is None), None)
        if nothing is not None:
            raise ConfigError(f"config.json has null for the key that gives model.{nothing}; write its value there")
        return settings
    except _UNREADABLE:
        # Families compute with what they read: the key without which they can is the one with the wrong value.
        found = {key: _error_without(key, family, config) for key in config}
        key = next((key for key, error in found.items() if error is None), None)
        key = key or next((key for key, error in found.items() if isinstance(error, ConfigError)), None)
    if key is None:
        raise ConfigError(f"config.json has several values that the family {family.name} cannot read")
    raise ConfigError(f"config.json has {key}: {str(config[key])[:60]}, which the family {family.name} cannot read")


# Null in a config of ours leaves them to the data, which a published model does not.
_NEVER_NULL = ("vocab_size", "image_size", "channels")
# What arithmetic with a text, a list or a zero in the place of a size raises.
_UNREADABLE = (TypeError, ValueError, AttributeError, ArithmeticError, LookupError, AssertionError)


def _error_without(key: str, family: Family, config: Mapping[str, Any]) -> Exception | None:
    try:
        family.from_published({name: value for name, value in config.items() if name != key})
    except (*_UNREADABLE, ConfigError) as error:
        return error
    return None


def sizes_of(kind: str) -> dict[str, dict[str, Any]]:
    """Returns the published sizes of every family whose models are of a kind (transformer, resnet, ...)."""
    rows = {name: dict(size) for family in FAMILIES.values() for name, size in family.sizes.items()}
    return {
        name: {key: value for key, value in size.items() if key != "kind"}
        for name, size in rows.items()
        if size.get("kind", "transformer") == kind
    }
