"""Our model group as families read it: plain values, with every size filled in. No jax here."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.base import Group
from jaxtrain.config.encoder_decoder import EncoderDecoderConfig
from jaxtrain.config.models import TransformerConfig
from jaxtrain.config.rope import LongRope
from jaxtrain.config.vit import ViTConfig
from jaxtrain.errors import ConfigError
from jaxtrain.published.longrope import longrope_factor


def settings_of(model: Group, *, vocab_size: int | None = None) -> dict[str, Any]:
    """Returns the keys of a model group as plain values, with what follows from other keys filled in.

    Args:
        model: The model group of a config.
        vocab_size: Vocabulary of the data, where the config leaves it to the data.
    """
    settings = model.model_dump()
    if isinstance(model, EncoderDecoderConfig):
        settings |= dict(num_decoder_layers=model.decoder_layers)
    if isinstance(model, TransformerConfig | EncoderDecoderConfig):
        settings |= dict(num_kv_heads=model.kv_heads, head_dim=model.head_width, mlp_dim=model.mlp_width)
    if isinstance(model, TransformerConfig) and isinstance(model.rope_scaling, LongRope):
        scaling = model.rope_scaling
        if scaling.attention_factor is None:
            factor = longrope_factor(scaling.original_length, model.max_sequence_length)
            settings["rope_scaling"] |= dict(attention_factor=factor)
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
