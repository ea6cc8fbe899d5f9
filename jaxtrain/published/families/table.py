"""The published families: one row each, by the `model_type` of their config.json. No jax here."""

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


def sizes_of(kind: str) -> dict[str, dict[str, Any]]:
    """Returns the published sizes of every family whose models are of a kind (transformer, resnet, ...)."""
    rows = {name: dict(size) for family in FAMILIES.values() for name, size in family.sizes.items()}
    return {
        name: {key: value for key, value in size.items() if key != "kind"}
        for name, size in rows.items()
        if size.get("kind", "transformer") == kind
    }
