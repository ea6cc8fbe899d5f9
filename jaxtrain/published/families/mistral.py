"""Mistral 7B and Nemo. No jax here.

Sources: the config.json published with each model (the base models).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.published.decoder import SILU, decoder_keys, split_width
from jaxtrain.published.families.llama import tensors
from jaxtrain.published.family import Family
from jaxtrain.published.keys import Fixed, Ignored, Mapped, read_keys, write_keys
from jaxtrain.published.rope import read_rope, rope_keys, write_rope

_7B = dict(
    num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14336, max_sequence_length=32768,
    position="rotary", norm="rmsnorm", norm_epsilon=1e-5, activation="swiglu", bias=False, tie_embeddings=False,
)  # fmt: skip

SIZES: dict[str, dict[str, Any]] = {
    "mistral_7b_v0.1": _7B | dict(vocab_size=32000, rope_theta=10000.0, sliding_window=4096),
    "mistral_7b_v0.3": _7B | dict(vocab_size=32768, rope_theta=1e6),
    "mistral_nemo_12b": _7B
    | dict(num_layers=40, embed_dim=5120, head_dim=128, vocab_size=131072, rope_theta=1e6, max_sequence_length=131072),
}

KEYS = (
    *decoder_keys(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=split_width, max_position_embeddings=131072, rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    ),
    Mapped("hidden_act", to="activation", default="silu", values=SILU),
    Mapped("sliding_window", to="sliding_window", default=4096),
    Ignored("layer_types", reason="all layers have the window of sliding_window"),
    *rope_keys(10000.0),
    Fixed("attention_dropout", (0.0, 0), reason="it drops attention weights in training"),
)  # fmt: skip


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="mistral")
    fixed = dict(kind="transformer", position="rotary", norm="rmsnorm", bias=False)
    return fixed | ours | read_rope(file, family="mistral")


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    names = dict(architectures=["MistralForCausalLM"], model_type="mistral")
    return names | write_keys(KEYS, model) | write_rope(model)


FAMILY = Family(
    name="mistral",
    model_type="mistral",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
