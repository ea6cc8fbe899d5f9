"""Mamba 2, in the form of transformers. No jax here.

Sources: table 10 of Dao and Gu 2024 and the config.json published with each model.
"""

from collections.abc import Mapping
from math import inf
from typing import Any

from jaxtrain.families.family import Family, checked, fixed, ignored, mapped, own, size_keys
from jaxtrain.formats.rows import (
    Entry,
    Row,
    copy,
    depthwise,
    dims,
    in_layers,
    in_turn,
    linear,
    output_row,
    vector,
)

_KEYS = {"state_dim": "state_size", "groups": "n_groups", "conv_width": "conv_kernel", "chunk": "chunk_size"}
_PER_HEAD = {"step_bias": "dt_bias", "log_decay": "A_log", "skip": "D"}
_FIXED = dict(position="none", norm="rmsnorm")
_NAMES = dict(num_heads="num_heads", norm_epsilon="layer_norm_epsilon")
_SIZES = {"130m": (24, 768), "370m": (48, 1024), "780m": (48, 1536), "1.3b": (48, 2048), "2.7b": (64, 2560)}
_DEFAULTS = dict(num_layers=64, embed_dim=4096, num_heads=128, head_dim=64, vocab_size=32768, norm_epsilon=1e-5)


def _read(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    return dict(state_space={ours: file[theirs] for ours, theirs in _KEYS.items()})


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    (width, heads, head_dim), said = dims(model, "DHK"), model["state_space"] or {}
    return {_KEYS[ours]: value for ours, value in said.items()} | dict(expand=heads * head_dim // width)


def _expansion(file: Mapping[str, Any]) -> tuple[int, ...]:
    return (int(file["num_heads"]) * int(file["head_dim"]) // int(file["hidden_size"]),)


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    (D, H, K, L, V), said = dims(model, "DHKLV"), model["state_space"]
    shared, width, path, theirs = (said["groups"], said["state_dim"]), said["conv_width"], "blocks/attention/", "mixer."
    projected = {"gate": (H, K), "value": (H, K), "key": shared, "query": shared, "step": (H,)}
    convolved = {f"{path}{name}_conv/": projected[name] for name in ("value", "key", "query")}
    rows = [
        *(Entry(path + ours, theirs + name, copy(H)) for ours, name in _PER_HEAD.items()),
        Entry("blocks/attention_norm/scale", "norm.weight", copy(D)),
        *in_turn("mixer.in_proj.weight", {f"{path}{n}/kernel": linear((D,), to) for n, to in projected.items()}),
        *in_turn("mixer.conv1d.weight", {f"{name}kernel": depthwise(width, *to) for name, to in convolved.items()}),
        *in_turn("mixer.conv1d.bias", {f"{name}bias": vector(*to) for name, to in convolved.items()}),
        Entry("blocks/attention/norm/scale", "mixer.norm.weight", vector(H, K)),
        Entry("blocks/attention/output/kernel", "mixer.out_proj.weight", linear((H, K), (D,))),
    ]
    return (
        *in_layers(rows, "backbone.layers.{layer}.", L),
        Entry("embedding", ("backbone.embeddings.weight", "backbone.embedding.weight"), copy(V, D)),
        Entry("output_norm/scale", "backbone.norm_f.weight", copy(D)),
        output_row(model, "lm_head.weight"),
    )


def _size(layers: int, width: int) -> dict[str, Any]:
    sizes = dict(num_layers=layers, embed_dim=width, num_heads=width // 32, head_dim=64, mlp_dim=None, state_space={})
    more = dict(vocab_size=50288, norm_epsilon=1e-5, tie_embeddings=True, max_sequence_length=2048)
    return _FIXED | sizes | more


FAMILY = Family(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    keys=(
        *size_keys(_DEFAULTS | dict(tie_embeddings=False), _NAMES),
        # transformers has no limit; ours is the length of pretraining.
        mapped("max_position_embeddings", "max_sequence_length", 2048, write_default=False),
        *(own(name, default) for name, default in zip(_KEYS.values(), (128, 8, 4, 256), strict=True)),
        checked("expand", 2, _expansion),
        fixed("use_bias", False),
        fixed("use_conv_bias", True),
        fixed("hidden_act", "silu", "swish"),
        fixed("time_step_limit", [0.0, inf], [0.0, {"__float__": "Infinity"}]),
        # Of initial values, of the dtype of the residual stream, and of older files, which transformers does not read.
        *ignored("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual",
                 "residual_in_fp32", "time_step_init_scheme", "time_step_scale", "rms_norm", "norm_before_gate",
                 "intermediate_size"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    read=_read,
    write=_write,
    sizes={f"mamba2_{name}": _size(layers, width) for name, (layers, width) in _SIZES.items()},
)  # fmt: skip
