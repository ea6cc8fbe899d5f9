"""Gemma 3, its text part: also of the models that see images too, whose other parts are left out. No jax here.

Sources: the config.json published with each model (the base models).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.published.decoder import decoder_keys, read_windows, write_windows
from jaxtrain.published.entries import Entry, Row, Skipped, Tied
from jaxtrain.published.families.gemma2 import ACTIVATION, BLOCK, scalar_of, scale_of, written_window
from jaxtrain.published.families.gemma2 import tensors as gemma2_tensors
from jaxtrain.published.family import Family
from jaxtrain.published.keys import Fixed, Key, Mapped, Own, read_keys, write_keys
from jaxtrain.published.rope import read_rope, rope_keys, write_rope

_LOCAL = (1, 1, 1, 1, 1, 0)
_LINEAR8 = dict(kind="linear", factor=8.0)
_COMMON = BLOCK | dict(
    vocab_size=262208, max_sequence_length=131072, rope_theta=1e6, norm_epsilon=1e-6, tie_embeddings=True,
    head_dim=256, qk_norm=True,
)  # fmt: skip


def _row(
    layers: int, width: int, heads: int, kv_heads: int, mlp: int, *, window: int = 1024, **more: object
) -> dict[str, Any]:
    sizes = dict(num_layers=layers, embed_dim=width, num_heads=heads, num_kv_heads=kv_heads, mlp_dim=mlp)
    local = dict(pattern=_LOCAL, window=window, rope_theta=10000.0)
    return _COMMON | sizes | dict(embedding_scale=math.sqrt(width), local_layers=local) | more


_SMALL = dict(vocab_size=262144, max_sequence_length=32768, window=512)

SIZES: dict[str, dict[str, Any]] = {
    "gemma3_270m": _row(18, 640, 4, 1, 2048, **_SMALL),  # pyright: ignore[reportArgumentType]
    "gemma3_1b": _row(26, 1152, 4, 1, 6912, **_SMALL),  # pyright: ignore[reportArgumentType]
    "gemma3_4b": _row(34, 2560, 8, 4, 10240, rope_scaling=_LINEAR8),
    "gemma3_12b": _row(48, 3840, 16, 8, 15360, rope_scaling=_LINEAR8),
    "gemma3_27b": _row(62, 5376, 32, 16, 21504, rope_scaling=_LINEAR8, head_dim=128, attention_scale=168**-0.5),
}

KEYS: tuple[Key, ...] = (
    *decoder_keys(
        vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, max_position_embeddings=131072, rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    ),
    *ACTIVATION,
    Mapped("final_logit_softcapping", to="logits_softcap", default=None),
    Own("query_pre_attn_scalar", default=256),
    Own("sliding_window", default=4096),
    Own("sliding_window_pattern", default=6, other_names=("_sliding_window_pattern",)),
    Own("layer_types", default=None),
    Own("rope_local_base_freq", default=10000.0),
    *rope_keys(1e6),
    Fixed("attention_bias", (False,), reason="it adds biases to attention, which its published models lack"),
    Fixed("attention_dropout", (0.0, 0), reason="it drops attention weights in training"),
    Fixed("attn_logit_softcapping", (None,), reason="transformers knows it and bounds no scores"),
    Fixed("use_bidirectional_attention", (False, None), reason="it attends ahead"),
)  # fmt: skip


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="gemma3_text")
    layers, every = int(file["num_hidden_layers"]), int(file["sliding_window_pattern"])
    types = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    windows = read_windows(file["layer_types"] or types, file["sliding_window"], layers=layers)
    parameters = file["rope_parameters"] or {}
    whole, local = parameters.get("full_attention", {}), parameters.get("sliding_attention", {})
    theta = float(local.get("rope_theta", file["rope_local_base_freq"]))
    if local.get("rope_type", "default") != "default":
        raise ConfigError(
            f"config.json has rope_parameters of sliding_attention of type {local['rope_type']}, which the family "
            "gemma3_text does not support; default would work"
        )
    if windows["local_layers"] is not None:
        windows["local_layers"]["rope_theta"] = theta
    elif windows["sliding_window"] is not None:  # every layer is a local one
        whole, file = {"rope_theta": theta}, {**file, "rope_scaling": None}
    fixed = dict(kind="transformer", **BLOCK, qk_norm=True, attention_scale=scale_of(file))
    fixed["embedding_scale"] = math.sqrt(file["hidden_size"])
    return fixed | ours | windows | read_rope(file | {"rope_parameters": whole}, family="gemma3_text")


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    types, window = write_windows(model)
    local = model["local_layers"]
    local_theta = model["rope_theta"] if local is None or local["rope_theta"] is None else local["rope_theta"]
    rope = write_rope(model)
    rope["rope_parameters"] = {
        "full_attention": {"rope_theta": model["rope_theta"], **(rope["rope_scaling"] or _PLAIN)},
        "sliding_attention": {"rope_theta": local_theta, **_PLAIN},
    }
    # A rope_scaling beside them would be taken for that of both kinds of layers.
    del rope["rope_scaling"]
    more = dict(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        query_pre_attn_scalar=scalar_of(model),
        layer_types=types,
        sliding_window=written_window(window),
        rope_local_base_freq=local_theta,
    )
    return more | write_keys(KEYS, model) | rope


_PLAIN = {"rope_type": "default"}


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    return gemma2_tensors(model)


FAMILY = Family(
    name="gemma3_text",
    model_type="gemma3_text",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for the config.json of a model that sees images too."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError("config.json of model_type gemma3 has no text_config; the text part cannot be read")
    return from_published(text)


def text_tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of the text part of a model that sees images too."""
    parts = ("language_model.model.", "model.language_model.")

    def renamed(row: Row) -> Row:
        if isinstance(row, Skipped):
            return dataclasses.replace(row, pattern=rf"(?:.*\.)?{row.pattern}")
        if not isinstance(row, Entry | Tied):
            return row
        names = (row.names,) if isinstance(row.names, str) else row.names
        theirs = [part + name.removeprefix("model.") for name in names for part in parts]
        heads = [f"language_model.{name}" for name in names if name.startswith("lm_head")]
        return dataclasses.replace(row, names=tuple([*(heads or theirs), *names]))

    images = Skipped(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\..*", "the part that sees images")
    return (*(renamed(row) for row in tensors(model)), images)


IMAGES_FAMILY = dataclasses.replace(
    FAMILY, name="gemma3", model_type="gemma3", from_published=text_part, tensors=text_tensors, sizes={}
)
"""Models that see images too: read as their text part, and written as models of the text part alone."""
