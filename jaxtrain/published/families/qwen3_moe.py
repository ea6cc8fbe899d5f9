"""Qwen3 with a mixture of experts. No jax here.

Sources: the config.json published with each model (the base models).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.published.decoder import SILU, decoder_keys
from jaxtrain.published.entries import Entry, Row
from jaxtrain.published.families.llama import attention_blocks, ends, in_decoder
from jaxtrain.published.families.qwen3 import COMMON
from jaxtrain.published.family import Family
from jaxtrain.published.keys import Fixed, Ignored, Mapped, Own, read_keys, write_keys
from jaxtrain.published.rope import read_rope, rope_keys, write_rope
from jaxtrain.published.transforms import linear

_EXPERTS = COMMON | dict(experts=dict(num_experts=128, experts_per_token=8), num_kv_heads=4)

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_30b_a3b": _EXPERTS | dict(num_layers=48, embed_dim=2048, num_heads=32, mlp_dim=768),
    "qwen3_235b_a22b": _EXPERTS | dict(num_layers=94, embed_dim=4096, num_heads=64, mlp_dim=1536),
}

KEYS = (
    *decoder_keys(
        vocab_size=151936, hidden_size=2048, intermediate_size=768, num_hidden_layers=24, num_attention_heads=32,
        num_key_value_heads=4, head_dim=lambda file: int(file["hidden_size"]) // int(file["num_attention_heads"]),
        max_position_embeddings=32768, rms_norm_eps=1e-6, tie_word_embeddings=False, mlp_key="moe_intermediate_size",
    ),
    Mapped("hidden_act", to="activation", default="silu", values=SILU),
    Own("num_experts", default=128, other_names=("num_local_experts",)),
    Own("num_experts_per_tok", default=8),
    Own("norm_topk_prob", default=False),
    *rope_keys(10000.0),
    Fixed("attention_bias", (False,), reason="it adds biases to attention, which its published models lack"),
    Fixed("attention_dropout", (0.0, 0), reason="it drops attention weights in training"),
    Fixed("use_sliding_window", (False,), reason="it gives all layers a window"),
    Fixed("decoder_sparse_step", (1,), reason="it leaves layers without experts"),
    Fixed("mlp_only_layers", ([], None), reason="it leaves layers without experts"),
    Ignored("intermediate_size", reason="the width of layers without experts, of which there are none"),
    Ignored("sliding_window", reason="not used without use_sliding_window"),
    Ignored("max_window_layers", reason="not used without use_sliding_window"),
    Ignored("layer_types", reason="all layers attend to all positions"),
    Ignored("router_aux_loss_coef", reason="weights a loss of training, as model.experts.load_balance_weight does"),
    Ignored("output_router_logits", reason="chooses what transformers returns"),
)  # fmt: skip


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="qwen3_moe")
    experts = dict(num_experts=file["num_experts"], experts_per_token=file["num_experts_per_tok"])
    if bool(file["norm_topk_prob"]) != _sums_to_1(experts):
        said, wanted = ("true", "false") if file["norm_topk_prob"] else ("false (or leaves it out)", "true")
        raise ConfigError(
            f"config.json has norm_topk_prob: {said}, which the family qwen3_moe does not support with "
            f"num_experts_per_tok: {file['num_experts_per_tok']} (weights of several experts sum to 1, one alone has "
            f"its probability); {wanted} would work"
        )
    fixed = dict(kind="transformer", position="rotary", norm="rmsnorm", bias=False, qk_norm=True, experts=experts)
    length = int(file["max_position_embeddings"])
    return fixed | ours | read_rope(file, family="qwen3_moe", original_length=length)


def _sums_to_1(experts: Mapping[str, Any]) -> bool:
    """Whether the weights of the chosen experts are divided by their sum: not where it would be that of one alone."""
    return experts["experts_per_token"] != 1


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    names = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe")
    names |= dict(decoder_sparse_step=1, mlp_only_layers=[], use_sliding_window=False, sliding_window=None)
    experts = model["experts"]
    counts = (
        {}
        if experts is None
        else dict(
            num_experts=experts["num_experts"],
            num_experts_per_tok=experts["experts_per_token"],
            norm_topk_prob=_sums_to_1(experts),
        )
    )
    return names | write_keys(KEYS, model) | counts | write_rope(model)


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    D, F, E = int(model["embed_dim"]), int(model["mlp_dim"]), int(model["experts"]["num_experts"])
    one = "mlp.experts.{expert}"
    rows = [
        *attention_blocks(model),
        Entry("blocks/mlp/router/kernel", "mlp.gate.weight", linear((D,), (E,))),
        Entry("blocks/mlp/gate/kernel", f"{one}.gate_proj.weight", linear((D,), (F,)), stack=(E,)),
        Entry("blocks/mlp/up/kernel", f"{one}.up_proj.weight", linear((D,), (F,)), stack=(E,)),
        Entry("blocks/mlp/down/kernel", f"{one}.down_proj.weight", linear((F,), (D,)), stack=(E,)),
    ]
    return (*in_decoder(rows, model), *ends(model))


FAMILY = Family(
    name="qwen3_moe",
    model_type="qwen3_moe",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
