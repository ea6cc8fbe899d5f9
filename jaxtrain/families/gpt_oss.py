"""gpt-oss: a mixture of experts with biases, attention sinks and alternating windows. No jax here.

Sources: OpenAI 2025 (the gpt-oss model card), and the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, decoder_keys, fixed, ignored, own, size
from jaxtrain.families.llama import ATTENTION, decoder, read_experts, write_experts
from jaxtrain.formats.rope import read_windows, whole_every, write_windows
from jaxtrain.formats.rows import Entry, Row, biased, block_rows, copy, dims, linear, pairs

_FIXED = dict(position="rotary", norm="rmsnorm", activation="clamped_swiglu", bias=True, attention_sinks=True)
_YARN = dict(kind="yarn", factor=32.0, original_length=4096, truncate=False)
_COMMON = _FIXED | dict(
    vocab_size=201088, max_sequence_length=131072, rope_theta=150000.0, rope_scaling=_YARN, norm_epsilon=1e-5,
    head_dim=64, num_kv_heads=8, mlp_dim=2880, local_layers=dict(pattern=(1, 0), window=128),
)  # fmt: skip
_DEFAULTS = size({}, 36, 2880, 64, vocab_size=201088, num_kv_heads=8, head_dim=64, mlp_dim=2880, norm_epsilon=1e-5)
_ROPE = dict(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096)


def _read(ours: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    types = file["layer_types"] or whole_every(2, file)
    return read_experts(ours, file) | read_windows(types, file["sliding_window"])


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    (D, H, F), E = dims(model, "DHF"), int(model["experts"]["num_experts"])
    up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    rows = [
        *block_rows(model, ATTENTION, beside=True),
        Entry("blocks/attention/sinks", "self_attn.sinks", copy(H)),
        *biased("blocks/mlp/router", "mlp.router", linear((D,), (E,)), (E,)),
        Entry("blocks/mlp/down/kernel", down, copy(E, F, D)),
        Entry("blocks/mlp/down/bias", f"{down}_bias", copy(E, D)),
    ]
    for at, name in enumerate(("gate", "up")):
        rows.append(Entry(f"blocks/mlp/{name}/kernel", up, pairs((E, D, F), at)))
        rows.append(Entry(f"blocks/mlp/{name}/bias", f"{up}_bias", pairs((E, F), at)))
    return decoder(model, rows)


FAMILY = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    keys=(
        *decoder_keys(_DEFAULTS | dict(max_sequence_length=131072), activation=fixed("hidden_act", "silu")),
        *(own("num_local_experts", 128, "num_experts"), own("num_experts_per_tok", 4, "experts_per_token")),
        *(own("sliding_window", 128), own("layer_types"), own("rope_theta", 150000.0)),
        *(own("rope_scaling"), own("rope_parameters", _ROPE)),
        *(fixed("attention_bias", True), fixed("swiglu_limit", 7.0), fixed("swiglu_alpha", 1.702)),
        *ignored("router_aux_loss_coef", "output_router_logits", "initial_context_length"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    rotary=True,
    read=_read,
    write=lambda model: write_experts(model) | write_windows(model),
    sizes={
        "gpt_oss_20b": size(_COMMON, 24, 2880, 64, experts=dict(num_experts=32, experts_per_token=4)),
        "gpt_oss_120b": size(_COMMON, 36, 2880, 64, experts=dict(num_experts=128, experts_per_token=4)),
    },
)
