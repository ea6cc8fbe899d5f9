"""Qwen2, Qwen2.5, Qwen3, and Qwen3 with a mixture of experts. No jax here.

Sources: the config.json published with each model (the base models).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families import llama
from jaxtrain.families.family import Family, decoder_keys, fixed, ignored, own, rope_keys, size
from jaxtrain.formats.rope import read_windows, write_windows
from jaxtrain.formats.rows import Row, block_rows

_COMMON = dict(
    vocab_size=151936, max_sequence_length=32768, position="rotary", rope_theta=1e6, norm="rmsnorm",
    norm_epsilon=1e-6, activation="swiglu",
)  # fmt: skip
_QWEN2 = _COMMON | dict(bias="qkv", tie_embeddings=True)
_QWEN3 = _COMMON | dict(bias=False, tie_embeddings=False, qk_norm=True, head_dim=128)
_MOE = _QWEN3 | dict(experts=dict(num_experts=128, experts_per_token=8))

_LONG = dict(max_sequence_length=131072)
_LARGE = dict(vocab_size=152064, tie_embeddings=False, max_sequence_length=131072)
_DEFAULTS = size({}, 32, 4096, 32, vocab_size=151936, num_kv_heads=32, mlp_dim=22016, max_sequence_length=32768)
_WINDOW_KEYS = (
    own("use_sliding_window", False),
    own("sliding_window", 4096),
    own("max_window_layers", 28),
    own("layer_types"),
)


def _read_windows(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the windows: of the layers from max_window_layers on, where the file uses any."""
    layers, window, first = int(file["num_hidden_layers"]), file["sliding_window"], int(file["max_window_layers"])
    if not file["use_sliding_window"] or window is None:
        return {"sliding_window": None, "local_layers": None}
    types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    return read_windows(file["layer_types"] or types, window)


def _write_windows(model: Mapping[str, Any]) -> dict[str, Any]:
    windows = write_windows(model)
    types, is_used = windows["layer_types"], windows["sliding_window"] is not None
    first = types.index("sliding_attention") if is_used else len(types)
    return windows | dict(use_sliding_window=is_used, max_window_layers=first)


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=(
        *decoder_keys(_DEFAULTS, write_head_dim=False),
        *_WINDOW_KEYS,
        *rope_keys(10000.0),
        fixed("use_mrope", False),
    ),
    tensors=llama.tensors,
    fixed=dict(position="rotary", norm="rmsnorm", bias="qkv"),
    rotary=True,
    read=_read_windows,
    write=_write_windows,
    sizes={
        "qwen2_0.5b": size(_QWEN2, 24, 896, 14, num_kv_heads=2, mlp_dim=4864, **_LONG),
        "qwen2_1.5b": size(_QWEN2, 28, 1536, 12, num_kv_heads=2, mlp_dim=8960, **_LONG),
        "qwen2_7b": size(_QWEN2, 28, 3584, 28, num_kv_heads=4, mlp_dim=18944, **_LARGE),
        "qwen2_72b": size(_QWEN2, 80, 8192, 64, num_kv_heads=8, mlp_dim=29568, **_LARGE, norm_epsilon=1e-5),
        "qwen2.5_0.5b": size(_QWEN2, 24, 896, 14, num_kv_heads=2, mlp_dim=4864),
        "qwen2.5_1.5b": size(_QWEN2, 28, 1536, 12, num_kv_heads=2, mlp_dim=8960, **_LONG),
        "qwen2.5_3b": size(_QWEN2, 36, 2048, 16, num_kv_heads=2, mlp_dim=11008),
        "qwen2.5_7b": size(_QWEN2, 28, 3584, 28, num_kv_heads=4, mlp_dim=18944, **_LARGE),
        "qwen2.5_14b": size(_QWEN2, 48, 5120, 40, num_kv_heads=8, mlp_dim=13824, **_LARGE, norm_epsilon=1e-5),
        "qwen2.5_32b": size(_QWEN2, 64, 5120, 40, num_kv_heads=8, mlp_dim=27648, **_LARGE, norm_epsilon=1e-5),
        "qwen2.5_72b": size(_QWEN2, 80, 8192, 64, num_kv_heads=8, mlp_dim=29568, **_LARGE, norm_epsilon=1e-5),
    },
)
_FIXED3 = dict(position="rotary", norm="rmsnorm", bias=False, qk_norm=True)

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=(
        *decoder_keys(_DEFAULTS | dict(head_dim=128)),
        *_WINDOW_KEYS,
        *rope_keys(10000.0),
        fixed("attention_bias", False),
    ),
    tensors=llama.tensors,
    fixed=_FIXED3,
    rotary=True,
    read=_read_windows,
    write=_write_windows,
    sizes={
        "qwen3_0.6b": size(_QWEN3, 28, 1024, 16, num_kv_heads=8, mlp_dim=3072, tie_embeddings=True),
        "qwen3_1.7b": size(_QWEN3, 28, 2048, 16, num_kv_heads=8, mlp_dim=6144, tie_embeddings=True),
        "qwen3_4b": size(_QWEN3, 36, 2560, 32, num_kv_heads=8, mlp_dim=9728, tie_embeddings=True),
        "qwen3_8b": size(_QWEN3, 36, 4096, 32, num_kv_heads=8, mlp_dim=12288),
        "qwen3_14b": size(_QWEN3, 40, 5120, 40, num_kv_heads=8, mlp_dim=17408),
        "qwen3_32b": size(_QWEN3, 64, 5120, 64, num_kv_heads=8, mlp_dim=25600),
    },
)


def _write_experts(model: Mapping[str, Any]) -> dict[str, Any]:
    said = dict(decoder_sparse_step=1, mlp_only_layers=[], use_sliding_window=False, sliding_window=None)
    written = llama.write_experts(model, "num_experts")
    return said | written | dict(norm_topk_prob=(model["experts"] or {}).get("normalize_weights"))


def _read_experts(ours: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    said = llama.read_experts(ours, file, "num_experts")["experts"]
    return dict(experts=said | dict(normalize_weights=file["norm_topk_prob"]))


def _expert_tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    names = {name: f"{name}_proj" for name in ("gate", "up", "down")}
    experts = llama.expert_blocks(model, "mlp.gate", "mlp.experts.{expert}", **names)
    return llama.decoder(model, [*block_rows(model, llama.ATTENTION), *experts])


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys=(
        *decoder_keys(
            size(_DEFAULTS, 24, 2048, 32, num_kv_heads=4, mlp_dim=768), names=dict(mlp_dim="moe_intermediate_size")
        ),
        own("num_experts", 128, "num_local_experts"),
        own("num_experts_per_tok", 8),
        own("norm_topk_prob", False),
        *rope_keys(10000.0),
        fixed("attention_bias", False),
        fixed("use_sliding_window", False),
        fixed("decoder_sparse_step", 1),
        fixed("mlp_only_layers", [], None),
        *ignored("intermediate_size", "sliding_window", "max_window_layers", "layer_types"),
        *ignored("router_aux_loss_coef", "output_router_logits"),
    ),
    tensors=_expert_tensors,
    fixed=_FIXED3,
    rotary=True,
    read=_read_experts,
    write=_write_experts,
    sizes={
        "qwen3_30b_a3b": size(_MOE, 48, 2048, 32, num_kv_heads=4, mlp_dim=768),
        "qwen3_235b_a22b": size(_MOE, 94, 4096, 64, num_kv_heads=4, mlp_dim=1536),
    },
)
