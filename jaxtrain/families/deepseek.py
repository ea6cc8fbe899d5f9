"""DeepSeek V2 Lite, DeepSeek V3 and R1, Moonlight: latent attention, and experts after some plain layers. No jax here.

Sources: DeepSeek-AI 2024 (V2, V3), Moonshot 2025 (Moonlight), and the config.json published with each model.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxtrain.families.family import Family, Key, decoder_keys, fixed, ignored, mapped, own, rope_keys, size
from jaxtrain.families.llama import MLP, ends, expert_blocks
from jaxtrain.formats.rope import read_rope, write_rope
from jaxtrain.formats.rows import Entry, Row, Skipped, block_rows, copy, dims, in_layers, linear

Values = Mapping[str, Any]

_FIXED = dict(position="rotary", norm="rmsnorm", bias=False)
# Their keys -> ours, in two groups of the model.
_EXPERTS = {
    "n_routed_experts": "num_experts", "num_experts_per_tok": "experts_per_token", "first_k_dense_replace":
    "dense_layers", "intermediate_size": "dense_dim", "routed_scaling_factor": "weights_scale",
}  # fmt: skip
_V3_EXPERTS = _EXPERTS | {"norm_topk_prob": "normalize_weights", "n_group": "groups", "topk_group": "groups_per_token"}
_LATENT = {
    "q_lora_rank": "query_rank", "kv_lora_rank": "key_value_rank", "qk_nope_head_dim": "nope_dim", "qk_rope_head_dim":
    "rope_dim", "v_head_dim": "value_dim",
}  # fmt: skip
_DEFAULTS = dict(
    kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=256,
    n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, intermediate_size=18432,
    routed_scaling_factor=2.5,
)  # fmt: skip
_MSCALES = ("mscale", "mscale_all_dim")


def _scale(factor: float, mscale: float, width: int) -> float:
    return (1 + 0.1 * math.log(factor) * mscale) ** 2 / math.sqrt(width)


def _read_rope(file: Values, width: int) -> dict[str, Any]:
    """Returns the rotary keys; Yarn's `mscale_all_dim` is in the scores, and divides the factor of cos and sin."""
    groups = {name: file[name] or {} for name in ("rope_scaling", "rope_parameters")}
    said = groups["rope_scaling"] or groups["rope_parameters"]
    if "yarn" not in (said.get("type"), said.get("rope_type")):
        return read_rope(file)
    plain = {name: {k: v for k, v in group.items() if k not in _MSCALES} for name, group in groups.items()}
    found, (ours, scores) = read_rope({**file, **plain}), (said.get(name) for name in _MSCALES)
    scaling = found["rope_scaling"]
    per_unit = 0.1 * math.log(scaling["factor"])
    if scores:
        found["attention_scale"] = _scale(scaling["factor"], scores, width)
    if ours and scores and scaling["attention_factor"] is None:
        scaling["attention_factor"] = (1 + per_unit * ours) / (1 + per_unit * scores)
    return found


def _write_rope(model: Values) -> dict[str, Any]:
    scaling, scale = model["rope_scaling"], model["attention_scale"]
    written = write_rope(model)
    if scale is None or scaling is None or scaling["kind"] != "yarn" or scaling["factor"] == 1:
        return written
    per_unit, root = 0.1 * math.log(scaling["factor"]), math.sqrt(scale * math.sqrt(model["head_dim"]))
    more = {"mscale_all_dim": round((root - 1) / per_unit, 6)}
    if scaling["attention_factor"] is not None:
        more["mscale"] = round((scaling["attention_factor"] * root - 1) / per_unit, 6)
    for group in (written["rope_scaling"], written["rope_parameters"]):
        group.pop("attention_factor", None)
        group |= more
    return written


def _read(ours: Values, file: Values, *, experts: Values, rule: dict[str, Any]) -> dict[str, Any]:
    latent, rest = ({to: file[name] for name, to in names.items()} for names in (_LATENT, experts))
    shared = int(file["n_shared_experts"] or 0) * int(file["moe_intermediate_size"])
    rope = _read_rope(file, latent["nope_dim"] + latent["rope_dim"])
    layers = int(file["num_hidden_layers"]) - rest["dense_layers"]
    return dict(latent=latent, experts=rest | rule | dict(shared_dim=shared or None), num_layers=layers) | rope


def _write(model: Values, *, experts: Values, rule: dict[str, Any]) -> dict[str, Any]:
    latent, own_experts = model["latent"], model["experts"]
    if latent is None or own_experts is None:
        return {}
    said = {name: latent[to] for name, to in _LATENT.items()} | {name: own_experts[to] for name, to in experts.items()}
    said["intermediate_size"] = own_experts["dense_dim"] or 4 * model["embed_dim"]
    said["n_shared_experts"] = (own_experts["shared_dim"] or 0) // model["mlp_dim"]
    said["num_hidden_layers"] = model["num_layers"] + own_experts["dense_layers"]
    return said | _write_rope(model) | rule


def _attention(model: Values, prefix: str) -> list[Entry]:
    (D, H), latent = dims(model, "DH"), model["latent"]
    rank, rope, value, nope = (latent[name] for name in ("key_value_rank", "rope_dim", "value_dim", "nope_dim"))
    query, queries = latent["query_rank"], (H, nope + rope)
    kernels = {
        "query": ("q_proj", (D,), queries), "key_value_latent": ("kv_a_proj_with_mqa", (D,), (rank + rope,)),
        "key_value": ("kv_b_proj", (rank,), (H, nope + value)), "output": ("o_proj", (H, value), (D,)),
    }  # fmt: skip
    scales = {"key_value_latent_norm": ("kv_a_layernorm", rank)}
    if query is not None:
        kernels |= {"query_latent": ("q_a_proj", (D,), (query,)), "query": ("q_b_proj", (query,), queries)}
        scales["query_latent_norm"] = ("q_a_layernorm", query)
    at, names = f"{prefix}attention/", {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return [
        *block_rows(model, names, prefix=prefix),
        *(Entry(f"{at}{our}/kernel", f"self_attn.{n}.weight", linear(i, o)) for our, (n, i, o) in kernels.items()),
        *(Entry(f"{at}{our}/scale", f"self_attn.{n}.weight", copy(width)) for our, (n, width) in scales.items()),
    ]


def _tensors(model: Values) -> tuple[Row, ...]:
    experts, layer = model["experts"], "model.layers.{layer}."
    first, count = experts["dense_layers"], model["num_layers"]
    names = {name: f"{name}_proj" for name in ("gate", "up", "down")}
    block = [*_attention(model, "blocks/"), *expert_blocks(model, "mlp.gate", "mlp.experts.{expert}", **names)]
    if experts["score_bias"]:
        block.append(Entry("blocks/mlp/score_bias", "mlp.gate.e_score_correction_bias", copy(experts["num_experts"])))
    if experts["shared_dim"] is not None:
        shared = {f"shared/{ours}": f"mlp.shared_experts.{theirs}" for ours, theirs in names.items()}
        block += block_rows({**model, "mlp_dim": experts["shared_dim"]}, shared)
    rows = in_layers((replace(row, first_layer=first) for row in block), layer, count)
    if first:
        dense = block_rows({**model, "mlp_dim": experts["dense_dim"]}, MLP, prefix="leading/")
        rows = (*in_layers([*_attention(model, "leading/"), *dense], layer, first), *rows)
    # The layer that predicts the token after the next one is read by nobody.
    return (*rows, *ends(model), Skipped(rf"model\.layers\.{first + count}\..+"))


def _keys(defaults: dict[str, Any], **ours: Any) -> tuple[Key, ...]:
    """Returns the keys of a family whose own keys have these defaults; `ours` are defaults by our names."""
    return (
        *(key for key in decoder_keys(ours, names=dict(mlp_dim="moe_intermediate_size")) if key.to != "head_dim"),
        *rope_keys(10000.0),
        *(own(name, default) for name, default in (_DEFAULTS | defaults).items()),
        *(fixed(name, False) for name in ("attention_bias", "mlp_bias")),
        *(fixed(name, 1) for name in ("pretraining_tp", "moe_layer_freq")),
        *ignored("head_dim", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef"),
        *ignored("output_router_logits", "num_nextn_predict_layers", "num_mtp_layers"),
    )


_YARN = dict(kind="yarn", factor=40.0, original_length=4096, attention_factor=1.0)
_MLA = dict(key_value_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
_COMMON = _FIXED | dict(norm_epsilon=1e-6, activation="swiglu", rotary_interleaved=True)
_LONG = _COMMON | dict(max_sequence_length=163840, rope_theta=10000.0, rope_scaling=_YARN)
_SMALL = dict(mlp_dim=1408, latent=_MLA)
_64 = dict(num_experts=64, experts_per_token=6, shared_dim=2816, dense_layers=1)
_V3 = dict(scores="sigmoid", score_bias=True)
_V3_SAID = dict(scoring_func="sigmoid", topk_method="noaux_tc")
_256 = _V3 | dict(num_experts=256, experts_per_token=8, normalize_weights=True, weights_scale=2.5, groups=8)
_256 |= dict(groups_per_token=4, shared_dim=2048, dense_layers=3, dense_dim=18432)
_MOONLIGHT = _COMMON | dict(vocab_size=163840, max_sequence_length=8192, rope_theta=50000.0) | dict(norm_epsilon=1e-5)
_V2 = dict(normalize_weights=False)
_V2_SAID = dict(scoring_func="softmax", topk_method="greedy", norm_topk_prob=False)


V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    keys=(
        *_keys(dict(n_group=8, topk_group=4, norm_topk_prob=True), **size({}, 61, 7168, 128, vocab_size=129280,
               mlp_dim=2048, max_sequence_length=4096)),
        *(fixed(name, value) for name, value in _V3_SAID.items()),
        mapped("rope_interleave", "rotary_interleaved", True),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    read=partial(_read, experts=_V3_EXPERTS, rule=_V3),
    write=partial(_write, experts=_V3_EXPERTS, rule=_V3_SAID),
    sizes={
        "deepseek_v3": size(_LONG, 58, 7168, 128, vocab_size=129280, mlp_dim=2048, experts=_256,
                            latent=_MLA | dict(query_rank=1536), attention_scale=_scale(40.0, 1.0, 192)),
        "moonlight_16b_a3b": size(_MOONLIGHT, 26, 2048, 16, **_SMALL, experts=_64 | _V3 | dict(
            dense_dim=11264, normalize_weights=True, weights_scale=2.446)),
    },
)  # fmt: skip

V2 = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    keys=(
        *_keys(dict(n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=None, first_k_dense_replace=0,
                    intermediate_size=11008, routed_scaling_factor=1.0), **size({}, 32, 4096, 32, vocab_size=102400,
               mlp_dim=1407, max_sequence_length=2048)),
        *(fixed(name, value) for name, value in _V2_SAID.items()),
        *ignored("n_group", "topk_group"),  # of another way to choose
    ),
    tensors=_tensors,
    fixed=_FIXED | dict(rotary_interleaved=True),
    read=partial(_read, experts=_EXPERTS, rule=_V2),
    write=partial(_write, experts=_EXPERTS, rule=_V2_SAID),
    sizes={
        "deepseek_v2_lite": size(_LONG, 26, 2048, 16, **_SMALL, experts=_64 | _V2 | dict(dense_dim=10944),
                                 vocab_size=102400, attention_scale=_scale(40.0, 0.707, 192)),
    },
)  # fmt: skip
