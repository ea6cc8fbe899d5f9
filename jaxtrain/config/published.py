"""The key `from` of a model group and `finetune.adapter`: what published files give a config. No jax here."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from jaxtrain.config.arguments import local_path
from jaxtrain.config.base import Group
from jaxtrain.config.errors import explain
from jaxtrain.config.model import CLIPConfig, EncoderDecoderConfig, ModelConfig, TransformerConfig, ViTConfig
from jaxtrain.config.rope import LongRope
from jaxtrain.errors import ConfigError
from jaxtrain.families.family import Family
from jaxtrain.families.table import FAMILIES, UnknownFamily, family_of, read_settings
from jaxtrain.formats.hub import read_published_config
from jaxtrain.formats.rope import longrope_factor

if TYPE_CHECKING:
    from jaxtrain.formats.peft_reading import AdapterArrays, AdapterConfig


def published_family(path: str) -> Family:
    """Returns the family of a published folder or .gguf file."""
    return _read(path)[0]


def published_settings(path: str) -> dict[str, Any]:
    """Returns the keys of a model group that a published folder or .gguf file gives."""
    return _read(path)[1]


def _read(path: str) -> tuple[Family, dict[str, Any]]:
    folder = local_path(path, what="model.from")
    return read_family(read_published_config(folder), folder)


def read_family(config: Mapping[str, Any], path: Path) -> tuple[Family, dict[str, Any]]:
    """Returns the family of the config.json of a folder or file, and the keys of our model group that it gives.

    Raises:
        ConfigError: The family is not known, which names the nearest one, or a key or value is not supported.
    """
    try:
        return family_of(config.get("model_type")), read_settings(config)
    except UnknownFamily as error:
        raise ConfigError(f"{path}: {error}; {_nearest(config)}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _nearest(config: Mapping[str, Any]) -> str:
    """The family that knows most keys of a config.json, and those that it does not know."""
    unknown = {name: [key for key in config if key not in family.known] for name, family in FAMILIES.items()}
    name = min(unknown, key=lambda name: len(unknown[name]))
    differing = f"keys {', '.join(unknown[name][:4])}" if unknown[name] else "its name"
    return f"nearest is {name}, but for {differing}; see docs/adding_a_family.md"


def settings_of(model: Group, *, vocab_size: int | None = None) -> dict[str, Any]:
    """Returns the keys of a model group with what follows from others filled in, and `vocab_size` where it has none."""
    settings = model.model_dump()
    if isinstance(model, EncoderDecoderConfig):
        settings |= dict(num_decoder_layers=model.decoder_layers)
    if isinstance(model, TransformerConfig | EncoderDecoderConfig):
        settings |= dict(num_kv_heads=model.kv_heads, head_dim=model.head_width, mlp_dim=model.mlp_width or None)
    if isinstance(model, TransformerConfig):
        settings |= dict(norm_bias=model.norms_have_biases)
        if model.experts is not None:
            settings["experts"] |= dict(normalize_weights=model.experts.normalizes)
    if isinstance(model, TransformerConfig) and isinstance(model.rope_scaling, LongRope):
        scaling = model.rope_scaling
        factor = scaling.attention_factor or longrope_factor(scaling.original_length, model.max_sequence_length)
        settings["rope_scaling"] |= dict(attention_factor=factor)
    if isinstance(model, ViTConfig):
        settings |= dict(mlp_dim=model.mlp_width)
    if isinstance(model, CLIPConfig):
        for name, tower in (("text", model.text_tower), ("image", model.image_tower)):
            settings[name] |= dict(mlp_dim=tower.mlp_width)
    if "vocab_size" in settings and settings["vocab_size"] is None:
        settings["vocab_size"] = vocab_size
    return settings


class _Model(Group):
    """A model group alone, as a config holds it."""

    model: ModelConfig


def parse_settings(settings: Mapping[str, Any]) -> Group:
    """Returns the model group of a family's settings."""
    return _Model.model_validate({"model": dict(settings)}).model


def settings_in(path: object, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every key of the model group of the published model at `path`, from those that its family reads."""
    try:
        return settings_of(parse_settings(settings))
    except ValidationError as error:
        raise ConfigError(f"the config.json of {path}: {explain(error, _Model, {'model': settings})}") from None


def adapter_settings(path: str, *, base: str, vocab_size: int | None) -> dict[str, Any]:
    """Returns the keys of `finetune.lora` that the folder of an adapter of a published model (`base`) gives.

    None: the vocabulary is that of the base.
    """
    # They read arrays, and `jaxtrain config` of other configs needs no NumPy.
    from jaxtrain.formats.peft_reading import open_adapter_folder, read_adapter_arrays

    folder, (family, settings) = open_adapter_folder(path), _read(base)
    if vocab_size is not None:
        settings["vocab_size"] = vocab_size
    rows = family.tensors(settings_in(base, settings))
    return lora_settings(folder.config, read_adapter_arrays(folder, rows))


def lora_settings(config: "AdapterConfig", arrays: "AdapterArrays") -> dict[str, Any]:
    """Returns the keys of `finetune.lora` of an adapter, from its adapter_config.json and its arrays."""
    rank, scale = arrays.rank, arrays.scale
    alpha = scale * (rank**0.5 if config.rank_stabilised else rank)
    return dict(
        rank=rank,
        # As it was written, where that is what it is.
        alpha=config.alpha if (rank, scale) == (config.rank, config.scale) else alpha,
        dropout=config.dropout,
        targets=tuple(kernel.removesuffix("/kernel") for kernel in arrays.factors),
        rank_stabilised=config.rank_stabilised,
        train_also=tuple(arrays.whole),
    )
