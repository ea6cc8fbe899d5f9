"""Llama 4 Scout, the text part also of the published folders, which see images too. No jax here.

Sources: Meta 2025 (the model card of Llama 4), and the config.json published with the model (the base model).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, checked, decoder_keys, fixed, ignored, mapped, own, rope_keys, size
from jaxtrain.families.gemma import with_images
from jaxtrain.families.llama import ATTENTION, decoder, read_experts, write_experts
from jaxtrain.families.smollm3 import by_interval
from jaxtrain.formats.rope import shortest_pattern
from jaxtrain.formats.rows import Entry, Row, block, block_rows, copy, dims, linear

Values = Mapping[str, Any]

_FIXED = dict(position="rotary", norm="rmsnorm", rotary_interleaved=True)
_RULE = dict(scores="sigmoid", normalize_weights=False, weigh_inputs=True)
_KINDS = {"full_attention": 0, "chunked_attention": 1}
_DEFAULTS = size({}, 48, 5120, 40, vocab_size=202048, num_kv_heads=8, head_dim=128, mlp_dim=8192, norm_epsilon=1e-5)
_SCOUT = _FIXED | _DEFAULTS | dict(
    max_sequence_length=262144, rope_theta=500000.0, rope_layers=(1, 1, 1, 0), qk_norm="rotated", bias=False,
    rope_scaling=dict(factor=16.0, high_frequency_factor=1.0), attention_temperature=dict(scale=0.1, step=8192),
    local_layers=dict(pattern=(1, 1, 1, 0), window=8192, chunked=True), activation="swiglu", tie_embeddings=False,
    experts=_RULE | dict(num_experts=16, experts_per_token=1, shared_dim=8192),
)  # fmt: skip


def _read(ours: Values, file: Values) -> dict[str, Any]:
    chunk, count = file["attention_chunk_size"], int(file["num_hidden_layers"])
    rotated = [int(bool(one)) for one in (file["no_rope_layers"] or by_interval(file))[:count]]
    chunked = [_KINDS[one] for one in file["layer_types"] or ()] or [one if chunk else 0 for one in rotated]
    grows = file["attn_temperature_tuning"] and not all(rotated)
    return dict(
        rope_layers=None if all(rotated) else shortest_pattern(rotated),
        local_layers=dict(pattern=shortest_pattern(chunked), window=chunk, chunked=True) if any(chunked) else None,
        attention_temperature=dict(scale=file["attn_scale"], step=file["floor_scale"]) if grows else None,
        experts=read_experts(ours, file)["experts"] | _RULE | dict(shared_dim=ours["mlp_dim"]),
    )


def _write(model: Values) -> dict[str, Any]:
    local: Values = model["local_layers"] or dict(pattern=(0,), window=None)
    grown = model["attention_temperature"]

    def layers(pattern: tuple[int, ...]) -> list[int]:
        return [pattern[at % len(pattern)] for at in range(int(model["num_layers"]))]

    said = dict(attn_scale=grown["scale"], floor_scale=grown["step"]) if grown else {}
    said |= dict(attention_chunk_size=local["window"], layer_types=[[*_KINDS][one] for one in layers(local["pattern"])])
    said |= dict(attn_temperature_tuning=bool(grown), no_rope_layers=layers(model["rope_layers"] or (1,)))
    return said | write_experts(model)


def _tensors(model: Values) -> tuple[Row, ...]:
    (D, F), experts, up = dims(model, "DF"), model["experts"], "feed_forward.experts.gate_up_proj"
    E = experts["num_experts"]
    shared = {f"shared/{name}": f"feed_forward.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
    return decoder(model, [
        *block_rows(model, ATTENTION),
        *block_rows({**model, "mlp_dim": experts["shared_dim"]}, shared),
        Entry("blocks/mlp/router/kernel", "feed_forward.router.weight", linear((D,), (E,))),
        *(Entry(f"blocks/mlp/{name}/kernel", up, block(copy(E, D, F), dim=2, start=at, of=2 * F))
          for name, at in (("gate", 0), ("up", F))),
        Entry("blocks/mlp/down/kernel", "feed_forward.experts.down_proj", copy(E, F, D)),
    ])  # fmt: skip


FAMILY = Family(
    name="llama4_text",
    architecture="Llama4ForCausalLM",
    keys=(
        *(*decoder_keys(_DEFAULTS | dict(max_sequence_length=131072)), *rope_keys(500000.0)),
        mapped("attention_bias", "bias", False, {False: False, True: "attention"}),
        mapped("use_qk_norm", "qk_norm", True, {True: "rotated", False: False}),
        *(own("num_local_experts", 16), fixed("num_experts_per_tok", 1), fixed("interleave_moe_layer_step", 1)),
        checked("moe_layers", None, lambda file: (None, [*range(int(file["num_hidden_layers"]))])),
        *(own("no_rope_layer_interval", 4), own("no_rope_layers"), own("attention_chunk_size", 8192)),
        *(own("layer_types"), own("attn_temperature_tuning", True), own("floor_scale", 8192), own("attn_scale", 0.1)),
        fixed("router_jitter_noise", 0.0, 0),
        *ignored("intermediate_size_mlp", "output_router_logits", "router_aux_loss_coef", "for_llm_compressor"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    rotary=True,
    read=_read,
    write=_write,
    sizes={"llama4_scout_17b_16e": _SCOUT},
)

WITH_IMAGES = with_images(FAMILY, "llama4")
