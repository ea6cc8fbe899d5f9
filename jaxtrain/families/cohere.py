"""Cohere (Command R, Aya 23) and Cohere 2 (Command R7B, Command A). No jax here.

Sources: the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, decoder_keys, fixed, ignored, mapped, no_ids, own, rope_keys, size
from jaxtrain.families.llama import ATTENTION, MLP, decoder
from jaxtrain.formats.rope import read_windows, whole_every, write_windows
from jaxtrain.formats.rows import Row, block_rows

_FIXED = dict(position="rotary", rotary_interleaved=True, norm="layernorm", block="parallel_one_norm")
_COMMON = _FIXED | dict(
    vocab_size=256000, max_sequence_length=8192, norm_epsilon=1e-5, activation="swiglu", bias=False,
    tie_embeddings=True, logits_scale=0.0625,
)  # fmt: skip
_35B = size(_COMMON, 40, 8192, 64, mlp_dim=22528, rope_theta=8e6)
_8B = size(_COMMON, 32, 4096, 32, num_kv_heads=8, mlp_dim=14336)
_104B = size(_COMMON, 64, 12288, 96, num_kv_heads=8, mlp_dim=33792)
_LAYERS = dict(local_layers=dict(pattern=(1, 1, 1, 0), window=4096), rope_layers=(1, 1, 1, 0))
_COHERE2 = _LAYERS | dict(logits_scale=0.25, rope_theta=50000.0)
_DEFAULTS = dict(vocab_size=256000, mlp_dim=22528, max_sequence_length=8192, norm_epsilon=1e-5, tie_embeddings=True)
_KEYS = (
    *decoder_keys(size(_DEFAULTS, 40, 8192, 64), names=dict(norm_epsilon="layer_norm_eps")),
    mapped("attention_bias", "bias", False, {False: False, True: "attention"}),
    own("logit_scale", 0.0625),
    *ignored("model_max_length"),
)


def _read(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    scale = float(file["logit_scale"])
    return dict(logits_scale=None if scale == 1 else scale)


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    return dict(logit_scale=model["logits_scale"] or 1.0) | no_ids(model, bos_token_id=5, eos_token_id=255001)


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    names = {ours: theirs for ours, theirs in (ATTENTION | MLP).items() if ours != "mlp_norm"}
    return decoder(model, block_rows(model, names))


COHERE = Family(
    name="cohere",
    architecture="CohereForCausalLM",
    keys=(
        *_KEYS,
        mapped("use_qk_norm", "qk_norm", False, {False: False, None: False, True: "per_head"}),
        *rope_keys(500000.0),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    rotary=True,
    read=_read,
    write=_write,
    sizes={
        "command_r_35b": _35B,
        "command_r_32b": _35B | dict(num_kv_heads=8, mlp_dim=24576, rope_theta=4e6, max_sequence_length=131072),
        "command_r_plus_104b": _104B | dict(rope_theta=7.5e7, logits_scale=0.8333333333333334, qk_norm="per_head"),
        "aya_23_8b": _8B | dict(rope_theta=10000.0),
        "aya_23_35b": _35B,
    },
)


def _read2(ours: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a window have rotary positions, and the others have none."""
    types = file["layer_types"] or whole_every(int(file["sliding_window_pattern"]), file)
    windows = read_windows(types, file["sliding_window"])
    plain = None if windows["sliding_window"] else (0,)
    rotated = windows["local_layers"]["pattern"] if windows["local_layers"] else plain
    return _read(ours, file) | windows | dict(rope_layers=rotated)


def _write2(model: Mapping[str, Any]) -> dict[str, Any]:
    # transformers asks for a window also where no layer has one.
    return _write(model) | write_windows(model, unused=4096)


COHERE2 = Family(
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    keys=(
        *_KEYS,
        *rope_keys(10000.0),
        own("sliding_window", 4096),
        own("sliding_window_pattern", 4),
        own("layer_types"),
        # What transformers does not read.
        fixed("use_qk_norm", False, None),
        fixed("layer_switch", 4, None),
        fixed("order_of_interleaved_layers", "local_attn_first"),
        fixed("position_embedding_type", "rope_gptj"),
        fixed("rotary_pct", 1.0, 1),
        *(fixed(name, True) for name in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block")),
        *ignored("use_parallel_embedding"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    rotary=True,
    read=_read2,
    write=_write2,
    sizes={
        "command_r7b": _8B | _COHERE2 | dict(max_sequence_length=132096),
        "command_a_111b": _104B | _COHERE2 | dict(mlp_dim=36864, max_sequence_length=131072),
    },
)
