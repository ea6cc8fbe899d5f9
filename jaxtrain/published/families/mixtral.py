"""Mixtral 8x7B and 8x22B. No jax here.

Sources: the config.json published with each model (the base models).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.published.decoder import SILU, decoder_keys, split_width
from jaxtrain.published.entries import Entry, Row
from jaxtrain.published.families.llama import attention_blocks, ends, in_decoder
from jaxtrain.published.family import Family
from jaxtrain.published.keys import Fixed, Ignored, Mapped, Own, read_keys, write_keys
from jaxtrain.published.rope import read_rope, rope_keys, write_rope
from jaxtrain.published.transforms import linear

_COMMON = dict(
    vocab_size=32000, max_sequence_length=32768, position="rotary", rope_theta=1e6, norm="rmsnorm",
    norm_epsilon=1e-5, activation="swiglu", tie_embeddings=False, bias=False, num_kv_heads=8, head_dim=128,
    experts=dict(num_experts=8, experts_per_token=2),
)  # fmt: skip

SIZES: dict[str, dict[str, Any]] = {
    "mixtral_8x7b": _COMMON | dict(num_layers=32, embed_dim=4096, num_heads=32, mlp_dim=14336),
    "mixtral_8x22b": _COMMON
    | dict(num_layers=56, embed_dim=6144, num_heads=48, mlp_dim=16384, max_sequence_length=65536),
}

KEYS = (
    *decoder_keys(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=split_width, max_position_embeddings=131072, rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
    Mapped("hidden_act", to="activation", default="silu", values=SILU),
    Mapped("sliding_window", to="sliding_window", default=None),
    Own("num_local_experts", default=8),
    Own("num_experts_per_tok", default=2),
    *rope_keys(1e6),
    Fixed("attention_dropout", (0.0, 0), reason="it drops attention weights in training"),
    Fixed("router_jitter_noise", (0.0, 0), reason="it adds noise to the routers in training"),
    Ignored("router_aux_loss_coef", reason="weights a loss of training, as model.experts.load_balance_weight does"),
    Ignored("output_router_logits", reason="chooses what transformers returns"),
)  # fmt: skip


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="mixtral")
    experts = dict(num_experts=file["num_local_experts"], experts_per_token=file["num_experts_per_tok"])
    if experts["experts_per_token"] == 1 != experts["num_experts"]:
        raise ConfigError(
            "config.json has num_experts_per_tok: 1, whose expert has the weight 1 in the family mixtral and its "
            "probability in jaxtrain; 2 or more would work"
        )
    fixed = dict(kind="transformer", position="rotary", norm="rmsnorm", bias=False, experts=experts)
    return fixed | ours | read_rope(file, family="mixtral")


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    names = dict(architectures=["MixtralForCausalLM"], model_type="mixtral")
    experts = model["experts"]
    counts = (
        {}
        if experts is None
        else dict(num_local_experts=experts["num_experts"], num_experts_per_tok=experts["experts_per_token"])
    )
    return names | write_keys(KEYS, model) | counts | write_rope(model)


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    D, F, E = int(model["embed_dim"]), int(model["mlp_dim"]), int(model["experts"]["num_experts"])
    moe, one = "block_sparse_moe", "block_sparse_moe.experts.{expert}"
    rows = [
        *attention_blocks(model),
        Entry("blocks/mlp/router/kernel", f"{moe}.gate.weight", linear((D,), (E,))),
        Entry("blocks/mlp/gate/kernel", f"{one}.w1.weight", linear((D,), (F,)), stack=(E,)),
        Entry("blocks/mlp/down/kernel", f"{one}.w2.weight", linear((F,), (D,)), stack=(E,)),
        Entry("blocks/mlp/up/kernel", f"{one}.w3.weight", linear((D,), (F,)), stack=(E,)),
    ]
    return (*in_decoder(rows, model), *ends(model))


FAMILY = Family(
    name="mixtral",
    model_type="mixtral",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
