"""The published families, by the `model_type` of their config.json, and those of other packages. No jax here.

The order counts: a model that no published folder gave is exported as the first family that can say all of it. Other
packages add families by the entry point group `jaxtrain.families`: model_type = "package.module:FAMILY".
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.families import (
    bert,
    clip,
    cohere,
    deepseek,
    falcon,
    gemma,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    llama,
    llama4,
    mamba2,
    modernbert,
    olmo,
    opt,
    phi,
    phi3,
    qwen,
    resnet,
    smollm3,
    stablelm,
    starcoder2,
    t5,
    vit,
)
from jaxtrain.families.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(llama.FAMILY, llama.MISTRAL, llama.MIXTRAL, qwen.QWEN2, qwen.QWEN3, qwen.QWEN3_MOE),
        *(gemma.GEMMA2, gemma.GEMMA3, gemma.WITH_IMAGES, phi3.FAMILY, gpt2.FAMILY, gpt_neox.FAMILY),
        *(bert.BERT, bert.ROBERTA, bert.DISTILBERT, bert.ELECTRA, vit.FAMILY, resnet.FAMILY, t5.FAMILY),
        *(starcoder2.FAMILY, modernbert.FAMILY),
        *(phi.FAMILY, gptj.FAMILY, opt.FAMILY, falcon.FAMILY),
        gpt_oss.FAMILY,
        *(stablelm.FAMILY, cohere.COHERE, cohere.COHERE2),
        *(olmo.OLMO2, olmo.OLMO3, granite.FAMILY, smollm3.FAMILY),
        *(glm4.FAMILY, clip.FAMILY, deepseek.V3, deepseek.V2, llama4.FAMILY, llama4.WITH_IMAGES),
        mamba2.FAMILY,
    )
}


class UnknownFamily(ConfigError):
    """No family has the model_type of a config.json."""


def family_of(model_type: object) -> Family:
    """Returns the family of a config.json's model_type, of this package or of another one.

    Raises:
        UnknownFamily: There is none.
    """
    if model_type in FAMILIES:
        return FAMILIES[str(model_type)]
    from importlib.metadata import entry_points

    for point in entry_points(group="jaxtrain.families"):
        if point.name == model_type:
            return point.load()
    raise UnknownFamily(f"config.json has model_type: {model_type}, which is not known")


def read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for the object in a config.json, which may hold anything.

    Raises:
        ConfigError: Its family is not known, or a key or a value of it is not supported.
    """
    family = family_of(config.get("model_type"))
    try:
        return family.from_published(config)
    # What arithmetic with a text, a list or a zero in the place of a size raises.
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise ConfigError(f"config.json has a value that the family {family.name} cannot read ({error})") from None


def sizes_of(kind: str) -> dict[str, dict[str, Any]]:
    """Returns the published sizes of every family whose models are of a kind (transformer, resnet, ...)."""
    rows = {name: dict(size) for family in FAMILIES.values() for name, size in family.sizes.items()}
    return {name: size for name, size in rows.items() if size.pop("kind", "transformer") == kind}
