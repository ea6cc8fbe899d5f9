"""Gemma 2. No jax here.

Sources: the config.json published with each model (the base models).
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxtrain.published.decoder import GELU_TANH, decoder_keys, read_windows, write_windows
from jaxtrain.published.entries import Entry, Row
from jaxtrain.published.families.llama import attention_blocks, ends, in_decoder, mlp_blocks
from jaxtrain.published.family import Family
from jaxtrain.published.keys import Fixed, Ignored, Key, Mapped, Own, read_keys, write_keys
from jaxtrain.published.rope import read_rope, rope_keys, write_rope
from jaxtrain.published.transforms import copy

_WINDOW = 4096
BLOCK = dict(block="sandwich", norm_offset=True, position="rotary", norm="rmsnorm", activation="geglu", bias=False)
"""What all models of Gemma 2 and 3 have in common."""
_COMMON = BLOCK | dict(
    vocab_size=256000, max_sequence_length=8192, rope_theta=10000.0, norm_epsilon=1e-6, tie_embeddings=True,
    head_dim=256, attention_softcap=50.0, logits_softcap=30.0, local_layers=dict(pattern=(1, 0), window=4096),
)  # fmt: skip


def _row(layers: int, width: int, heads: int, kv_heads: int, mlp: int, **more: object) -> dict[str, Any]:
    sizes = dict(num_layers=layers, embed_dim=width, num_heads=heads, num_kv_heads=kv_heads, mlp_dim=mlp)
    return _COMMON | sizes | dict(embedding_scale=math.sqrt(width)) | more


SIZES: dict[str, dict[str, Any]] = {
    "gemma2_2b": _row(26, 2304, 8, 4, 9216),
    "gemma2_9b": _row(42, 3584, 16, 8, 14336),
    "gemma2_27b": _row(46, 4608, 32, 16, 36864, head_dim=128, attention_scale=144**-0.5),
}

ACTIVATION = (
    Mapped(
        "hidden_activation", to="activation", default="gelu_pytorch_tanh", values={name: "geglu" for name in GELU_TANH}
    ),
    Ignored("hidden_act", reason="hidden_activation takes its place"),
)
"""The keys of the activation: old files have a second one that their code does not read."""

KEYS: tuple[Key, ...] = (
    *decoder_keys(
        vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, max_position_embeddings=8192, rms_norm_eps=1e-6, tie_word_embeddings=True,
    ),
    *ACTIVATION,
    Mapped("attn_logit_softcapping", to="attention_softcap", default=50.0),
    Mapped("final_logit_softcapping", to="logits_softcap", default=30.0),
    Own("query_pre_attn_scalar", default=256),
    Own("sliding_window", default=_WINDOW),
    Own("layer_types", default=None),
    *rope_keys(10000.0),
    Fixed("attention_bias", (False,), reason="it adds biases to attention, which its published models lack"),
    Fixed("attention_dropout", (0.0, 0), reason="it drops attention weights in training"),
    Fixed("use_bidirectional_attention", (None, False), reason="it attends ahead"),
)  # fmt: skip


def scale_of(file: Mapping[str, Any]) -> float | None:
    """Returns `attention_scale` of a config.json; None where it is our default."""
    scalar = float(file["query_pre_attn_scalar"])
    return None if scalar == file["head_dim"] else scalar**-0.5


def scalar_of(model: Mapping[str, Any]) -> float | int:
    """Returns `query_pre_attn_scalar` of a model group, the inverse of `scale_of`."""
    if model["attention_scale"] is None:
        return int(model["head_dim"])
    scalar = model["attention_scale"] ** -2
    return round(scalar) if math.isclose(scalar, round(scalar), rel_tol=1e-9) else scalar


def written_window(window: int | None) -> int:
    """Returns `sliding_window` of a config.json: transformers asks for one also where no layer has a window."""
    return _WINDOW if window is None else window


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="gemma2")
    layers = int(file["num_hidden_layers"])
    types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    windows = read_windows(file["layer_types"] or types, file["sliding_window"], layers=layers)
    fixed = dict(kind="transformer", **BLOCK, attention_scale=scale_of(file))
    fixed["embedding_scale"] = math.sqrt(file["hidden_size"])
    return fixed | ours | windows | read_rope(file, family="gemma2")


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    types, window = write_windows(model)
    more = dict(
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        query_pre_attn_scalar=scalar_of(model),
        layer_types=types,
        sliding_window=written_window(window),
    )
    return more | write_keys(KEYS, model) | write_rope(model)


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    D = int(model["embed_dim"])
    # Llama's name for the norm of the MLP's input is that of attention's output here.
    shared = [row for row in attention_blocks(model) if row.path != "blocks/mlp_norm/scale"]
    rows = [
        *shared,
        *mlp_blocks(model),
        Entry("blocks/attention_output_norm/scale", "post_attention_layernorm.weight", copy(D)),
        Entry("blocks/mlp_norm/scale", "pre_feedforward_layernorm.weight", copy(D)),
        Entry("blocks/mlp_output_norm/scale", "post_feedforward_layernorm.weight", copy(D)),
    ]
    return (*in_decoder(rows, model), *ends(model))


FAMILY = Family(
    name="gemma2",
    model_type="gemma2",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
