"""Gemma 2, and the text part of Gemma 3, also of the models that see images too. No jax here.

Sources: the config.json published with each model (the base models).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import (
    GELU_TANH,
    Family,
    Key,
    decoder_keys,
    fixed,
    ignored,
    mapped,
    own,
    rope_keys,
    size,
)
from jaxtrain.families.llama import ATTENTION, MLP, decoder
from jaxtrain.formats.rope import read_ropes, read_windows, whole_every, write_ropes, write_windows
from jaxtrain.formats.rows import Entry, Row, Skipped, Tied, all_names, block_rows

_BLOCK = dict(block="sandwich", norm_offset=True, position="rotary", norm="rmsnorm", activation="geglu", bias=False)
_COMMON = _BLOCK | dict(norm_epsilon=1e-6, tie_embeddings=True, head_dim=256)
_GEMMA2 = _COMMON | dict(
    vocab_size=256000, max_sequence_length=8192, rope_theta=10000.0, attention_softcap=50.0, logits_softcap=30.0,
    local_layers=dict(pattern=(1, 0), window=4096),
)  # fmt: skip
_LOCAL = dict(pattern=(1, 1, 1, 1, 1, 0), window=1024, rope_theta=10000.0)
_GEMMA3 = _COMMON | dict(
    vocab_size=262208, max_sequence_length=131072, rope_theta=1e6, qk_norm=True, local_layers=_LOCAL,
    rope_scaling=dict(kind="linear", factor=8.0),
)  # fmt: skip
_SMALL3 = {name: value for name, value in _GEMMA3.items() if name != "rope_scaling"} | dict(
    vocab_size=262144, max_sequence_length=32768, local_layers=_LOCAL | dict(window=512),
)  # fmt: skip


def _sized(common: Mapping[str, Any], layers: int, width: int, heads: int, **more: object) -> dict[str, Any]:
    return size(common, layers, width, heads, embedding_scale=math.sqrt(width)) | more


_ACTIVATION = mapped("hidden_activation", "activation", "gelu_pytorch_tanh", {name: "geglu" for name in GELU_TANH})


def _keys(vocabulary: int, length: int) -> tuple[Key, ...]:
    """The keys of both generations, with the sizes that differ."""
    sizes = size({}, 26, 2304, 8, num_kv_heads=4, mlp_dim=9216, head_dim=256, tie_embeddings=True)
    return (
        *decoder_keys(sizes | dict(vocab_size=vocabulary, max_sequence_length=length), activation=_ACTIVATION),
        *ignored("hidden_act"),  # hidden_activation takes its place
        own("query_pre_attn_scalar", 256),
        own("sliding_window", 4096),
        own("layer_types"),
        fixed("attention_bias", False),
        fixed("use_bidirectional_attention", None, False),
    )


def _read(file: Mapping[str, Any], period: int) -> dict[str, Any]:
    """Returns scales and windows; where the file names no types, each `period`-th layer has no window."""
    scalar = float(file["query_pre_attn_scalar"])
    return dict(
        attention_scale=None if scalar == file["head_dim"] else scalar**-0.5,
        embedding_scale=math.sqrt(file["hidden_size"]),
        **read_windows(file["layer_types"] or whole_every(period, file), file["sliding_window"]),
    )


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    scale = model["attention_scale"]
    scalar = int(model["head_dim"]) if scale is None else scale**-2
    scalar = round(scalar) if math.isclose(scalar, round(scalar), rel_tol=1e-9) else scalar
    # transformers asks for a window also where no layer has one.
    return dict(query_pre_attn_scalar=scalar) | write_windows(model, unused=4096)


# Llama's name for the norm of the MLP's input is that of attention's output here.
_NAMES = {ours: name for ours, name in ATTENTION.items() if ours != "mlp_norm"} | MLP | {
    "attention_output_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}  # fmt: skip


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    return decoder(model, block_rows(model, _NAMES))


GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    keys=(
        *_keys(256000, 8192),
        mapped("attn_logit_softcapping", "attention_softcap", 50.0),
        mapped("final_logit_softcapping", "logits_softcap", 30.0),
        *rope_keys(10000.0),
    ),
    tensors=_tensors,
    fixed=_BLOCK,
    rotary=True,
    read=lambda _, file: _read(file, 2),
    write=_write,
    sizes={
        "gemma2_2b": _sized(_GEMMA2, 26, 2304, 8, num_kv_heads=4, mlp_dim=9216),
        "gemma2_9b": _sized(_GEMMA2, 42, 3584, 16, num_kv_heads=8, mlp_dim=14336),
        "gemma2_27b": _sized(
            _GEMMA2, 46, 4608, 32, num_kv_heads=16, mlp_dim=36864, head_dim=128, attention_scale=144**-0.5
        ),
    },
)


def _read3(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    found = _read(file, int(file["sliding_window_pattern"]))
    return read_ropes(file, found, file["rope_local_base_freq"])


def _write3(model: Mapping[str, Any]) -> dict[str, Any]:
    # Not rope_scaling, which would be taken for that of both kinds of layers.
    ropes = write_ropes(model)
    local = ropes["rope_parameters"]["sliding_attention"]
    return _write(model) | ropes | dict(rope_local_base_freq=local["rope_theta"])


GEMMA3 = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys=(
        *_keys(262208, 131072),
        mapped("final_logit_softcapping", "logits_softcap", None),
        own("sliding_window_pattern", 6, "_sliding_window_pattern"),
        own("rope_local_base_freq", 10000.0),
        *rope_keys(1e6),
        fixed("attn_logit_softcapping", None),
    ),
    tensors=_tensors,
    fixed=_BLOCK | dict(qk_norm=True),
    read=_read3,
    write=_write3,
    sizes={
        "gemma3_270m": _sized(_SMALL3, 18, 640, 4, num_kv_heads=1, mlp_dim=2048),
        "gemma3_1b": _sized(_SMALL3, 26, 1152, 4, num_kv_heads=1, mlp_dim=6912),
        "gemma3_4b": _sized(_GEMMA3, 34, 2560, 8, num_kv_heads=4, mlp_dim=10240),
        "gemma3_12b": _sized(_GEMMA3, 48, 3840, 16, num_kv_heads=8, mlp_dim=15360),
        "gemma3_27b": _sized(
            _GEMMA3, 62, 5376, 32, num_kv_heads=16, mlp_dim=21504, head_dim=128, attention_scale=168**-0.5
        ),
    },
)


def with_images(text: Family, name: str) -> Family:
    """Returns the family of models that see images too: read as their text part, which is of the family `text`."""

    def renamed(row: Row) -> Row:
        if isinstance(row, Skipped):
            return Skipped(rf"(?:.*\.)?{row.pattern}")
        if not isinstance(row, Entry | Tied):
            return row
        names = all_names(row)
        parts = ("language_model.model.", "model.language_model.")
        theirs = [part + name.removeprefix("model.") for name in names for part in parts]
        heads = [f"language_model.{name}" for name in names if name.startswith("lm_head")]
        return dataclasses.replace(row, names=(*(heads or theirs), *names))

    def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
        images = Skipped(r"(?:model\.)?(?:vision_tower|vision_model|multi_modal_projector)\..*")
        return (*map(renamed, text.tensors(model)), images)

    return dataclasses.replace(text, name=name, text=text, tensors=tensors, sizes={})


WITH_IMAGES = with_images(GEMMA3, "gemma3")
