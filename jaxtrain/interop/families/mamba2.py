"""Mamba 2, in the form of transformers. No jax here.

Sources: table 10 of Dao and Gu 2024 and the config.json published with each model; the tokenizer of GPT-NeoX.
"""

from collections.abc import Mapping
from itertools import accumulate
from math import inf
from typing import Any

from jaxtrain.interop.families.family import Family, checked, fixed, ignored, mapped, own, size_keys
from jaxtrain.interop.formats.rows import (
    Entry,
    Row,
    Transform,
    block,
    copy,
    depthwise,
    dims,
    in_layers,
    linear,
    output_row,
    vector,
)

_FIXED = dict(position="none", norm="rmsnorm")
_KEYS = {"state_dim": "state_size", "groups": "n_groups", "conv_width": "conv_kernel", "chunk": "chunk_size"}


def _read(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    return dict(state_space={ours: file[theirs] for ours, theirs in _KEYS.items()})


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    width, heads, head_dim = dims(model, "DHK")
    said = model["state_space"] or {}
    return {theirs: said[ours] for ours, theirs in _KEYS.items() if said} | dict(expand=heads * head_dim // width)


def _expansion(file: Mapping[str, Any]) -> tuple[int, ...]:
    return (int(file["num_heads"]) * int(file["head_dim"]) // int(file["hidden_size"]),)


def _in_turn(parts: Mapping[str, Transform], name: str, end: str) -> list[Entry]:
    """The rows of parameters that follow each other along the first dim of one tensor."""
    sizes = [part.theirs[0] for part in parts.values()]
    starts = accumulate(sizes[:-1], initial=0)
    rows = zip(parts.items(), starts, strict=True)
    return [
        Entry(f"blocks/attention/{ours}/{end}", name, block(part, dim=0, start=start, of=sum(sizes)))
        for (ours, part), start in rows
    ]


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    D, H, K, L, V = dims(model, "DHKLV")
    said = model["state_space"]
    shared, width = (said["groups"], said["state_dim"]), said["conv_width"]
    projected = {"gate": (H, K), "value": (H, K), "key": shared, "query": shared, "step": (H,)}
    convolved = {f"{name}_conv": projected[name] for name in ("value", "key", "query")}
    rows = [
        *(Entry(f"blocks/attention/{ours}", f"mixer.{theirs}", copy(H)) for ours, theirs in _PER_HEAD.items()),
        Entry("blocks/attention_norm/scale", "norm.weight", copy(D)),
        *_in_turn({name: linear((D,), shape) for name, shape in projected.items()}, "mixer.in_proj.weight", "kernel"),
        *_in_turn({n: depthwise(width, *shape) for n, shape in convolved.items()}, "mixer.conv1d.weight", "kernel"),
        *_in_turn({name: vector(*shape) for name, shape in convolved.items()}, "mixer.conv1d.bias", "bias"),
        Entry("blocks/attention/norm/scale", "mixer.norm.weight", vector(H, K)),
        Entry("blocks/attention/output/kernel", "mixer.out_proj.weight", linear((H, K), (D,))),
    ]
    ends = (
        Entry("embedding", ("backbone.embeddings.weight", "backbone.embedding.weight"), copy(V, D)),
        Entry("output_norm/scale", "backbone.norm_f.weight", copy(D)),
        output_row(model, "lm_head.weight"),
    )
    return (*in_layers(rows, "backbone.layers.{layer}.", L), *ends)


_PER_HEAD = {"step_bias": "dt_bias", "log_decay": "A_log", "skip": "D"}
_DEFAULTS = dict(vocab_size=32768, embed_dim=4096, num_layers=64, num_heads=128, head_dim=64, norm_epsilon=1e-5)
_STATE = dict(state_dim=128, groups=1, conv_width=4, chunk=256)


def _size(layers: int, width: int) -> dict[str, Any]:
    own = dict(num_layers=layers, embed_dim=width, num_heads=width // 32, head_dim=64, state_space=_STATE)
    # Nulls take the place of what the file of a config has.
    more = dict(vocab_size=50288, norm_epsilon=1e-5, tie_embeddings=True, max_sequence_length=2048, mlp_dim=None)
    return _FIXED | own | more


FAMILY = Family(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    keys=(
        *size_keys(
            _DEFAULTS | dict(tie_embeddings=False), dict(num_heads="num_heads", norm_epsilon="layer_norm_epsilon")
        ),
        # transformers has no limit; ours is the length of pretraining.
        mapped("max_position_embeddings", "max_sequence_length", 2048, write_default=False),
        *(own(name, default) for name, default in zip(_KEYS.values(), (128, 8, 4, 256), strict=True)),
        checked("expand", 2, _expansion),
        fixed("use_bias", False),
        fixed("use_conv_bias", True),
        fixed("hidden_act", "silu", "swish"),
        fixed("time_step_limit", [0.0, inf], [0.0, {"__float__": "Infinity"}]),
        # Of the initial values; and whether the residual stream is float32 beside 16-bit layers.
        *ignored("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
        *ignored("residual_in_fp32", "time_step_init_scheme", "time_step_scale"),
        # Of older files, which transformers does not read.
        *ignored("rms_norm", "norm_before_gate", "intermediate_size"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    read=_read,
    write=_write,
    sizes={
        "mamba2_130m": _size(24, 768),
        "mamba2_370m": _size(48, 1024),
        "mamba2_780m": _size(48, 1536),
        "mamba2_1.3b": _size(48, 2048),
        "mamba2_2.7b": _size(64, 2560),
    },
)
