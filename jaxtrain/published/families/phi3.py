"""Phi-3 and Phi-3.5, dense. No jax here.

Sources: the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.published.decoder import NO_DROPOUT, SILU, as_many_as_heads, decoder_keys, no_tokens, split_width
from jaxtrain.published.entries import Entry, Row
from jaxtrain.published.families.llama import ends, in_decoder
from jaxtrain.published.family import Family
from jaxtrain.published.keys import Fixed, Ignored, Mapped, Own, read_keys, write_keys
from jaxtrain.published.rope import read_fraction, read_rope, rope_keys, write_rope
from jaxtrain.published.transforms import block, copy, linear

_COMMON = dict(
    vocab_size=32064, max_sequence_length=4096, position="rotary", rope_theta=10000.0, norm="rmsnorm",
    norm_epsilon=1e-5, activation="swiglu", bias=False, tie_embeddings=False, sliding_window=2047,
)  # fmt: skip

# The sizes for 128k tokens hold tables of factors; they are read from their folders.
SIZES: dict[str, dict[str, Any]] = {
    "phi3_mini_4k": _COMMON | dict(num_layers=32, embed_dim=3072, num_heads=32, mlp_dim=8192),
    "phi3_medium_4k": _COMMON | dict(num_layers=40, embed_dim=5120, num_heads=40, num_kv_heads=10, mlp_dim=17920),
}

KEYS = (
    *decoder_keys(
        vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=as_many_as_heads, head_dim=split_width, max_position_embeddings=4096, rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
    Mapped("hidden_act", to="activation", default="silu", values=SILU),
    Mapped("sliding_window", to="sliding_window", default=None),
    Own("original_max_position_embeddings", default=4096),
    Own("partial_rotary_factor", default=1.0),
    *rope_keys(10000.0),
    Fixed("attention_bias", (False,), reason="it adds biases to attention, which its published models lack"),
    Fixed("attention_dropout", (0.0, 0), reason="it drops attention weights in training"),
    Ignored("embd_pdrop", reason=NO_DROPOUT),
    Ignored("resid_pdrop", reason=NO_DROPOUT),
)  # fmt: skip


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="phi3")
    fixed: dict[str, Any] = dict(kind="transformer", position="rotary", norm="rmsnorm", bias=False)
    fixed["rotary_fraction"] = read_fraction(file, "partial_rotary_factor")
    length = int(file["original_max_position_embeddings"])
    return fixed | ours | read_rope(file, family="phi3", original_length=length)


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    scaling = model["rope_scaling"]
    if scaling is not None and scaling["kind"] != "longrope":
        raise ConfigError(f"model.rope_scaling.kind={scaling['kind']}: transformers opens a phi3 with longrope alone")
    length = model["max_sequence_length"] if scaling is None else scaling["original_length"]
    more = dict(
        architectures=["Phi3ForCausalLM"],
        model_type="phi3",
        original_max_position_embeddings=length,
        partial_rotary_factor=model["rotary_fraction"],
    )
    written = write_keys(KEYS, model)
    # transformers divides the width by the heads, and knows no key for another width of a head.
    if written["head_dim"] == written["hidden_size"] // written["num_attention_heads"]:
        del written["head_dim"]
    return more | written | write_rope(model) | no_tokens(model, eos_token_id=32000, pad_token_id=32000)


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    D, H, G, K, F = (int(model[key]) for key in ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"))
    qkv, up = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"

    def part(name: str, heads: int, start: int) -> Entry:
        rows = block(linear((D,), (heads, K)), dim=0, start=start * K, of=(H + 2 * G) * K)
        return Entry(f"blocks/attention/{name}/kernel", qkv, rows)

    rows = [
        Entry("blocks/attention_norm/scale", "input_layernorm.weight", copy(D)),
        part("query", H, 0),
        part("key", G, H),
        part("value", G, H + G),
        Entry("blocks/attention/output/kernel", "self_attn.o_proj.weight", linear((H, K), (D,))),
        Entry("blocks/mlp_norm/scale", "post_attention_layernorm.weight", copy(D)),
        Entry("blocks/mlp/gate/kernel", up, block(linear((D,), (F,)), dim=0, start=0, of=2 * F)),
        Entry("blocks/mlp/up/kernel", up, block(linear((D,), (F,)), dim=0, start=F, of=2 * F)),
        Entry("blocks/mlp/down/kernel", "mlp.down_proj.weight", linear((F,), (D,))),
    ]
    return (*in_decoder(rows, model), *ends(model))


FAMILY = Family(
    name="phi3",
    model_type="phi3",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
