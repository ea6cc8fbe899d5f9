"""Qwen3, dense. No jax here.

Sources: the config.json published with each model (the base models).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.published.decoder import SILU, decoder_keys
from jaxtrain.published.families.llama import tensors
from jaxtrain.published.families.qwen2 import WINDOW_KEYS, window_keys_of, windows_of
from jaxtrain.published.family import Family
from jaxtrain.published.keys import Fixed, Mapped, read_keys, write_keys
from jaxtrain.published.rope import read_rope, rope_keys, write_rope

COMMON = dict(
    vocab_size=151936, max_sequence_length=32768, position="rotary", rope_theta=1e6, norm="rmsnorm",
    norm_epsilon=1e-6, activation="swiglu", bias=False, qk_norm=True, head_dim=128, tie_embeddings=False,
)  # fmt: skip


def _row(layers: int, width: int, heads: int, mlp: int, **more: object) -> dict[str, Any]:
    sizes = dict(num_layers=layers, embed_dim=width, num_heads=heads, num_kv_heads=8, mlp_dim=mlp)
    return COMMON | sizes | more


SIZES: dict[str, dict[str, Any]] = {
    "qwen3_0.6b": _row(28, 1024, 16, 3072, tie_embeddings=True),
    "qwen3_1.7b": _row(28, 2048, 16, 6144, tie_embeddings=True),
    "qwen3_4b": _row(36, 2560, 32, 9728, tie_embeddings=True),
    "qwen3_8b": _row(36, 4096, 32, 12288),
    "qwen3_14b": _row(40, 5120, 40, 17408),
    "qwen3_32b": _row(64, 5120, 64, 25600),
}

KEYS = (
    *decoder_keys(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, head_dim=128, max_position_embeddings=32768, rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    ),
    Mapped("hidden_act", to="activation", default="silu", values=SILU),
    *WINDOW_KEYS,
    *rope_keys(10000.0),
    Fixed("attention_bias", (False,), reason="it adds biases to attention, which its published models lack"),
    Fixed("attention_dropout", (0.0, 0), reason="it drops attention weights in training"),
)  # fmt: skip


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="qwen3")
    fixed = dict(kind="transformer", position="rotary", norm="rmsnorm", bias=False, qk_norm=True)
    length = int(file["max_position_embeddings"])
    return fixed | ours | windows_of(file) | read_rope(file, family="qwen3", original_length=length)


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    names = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    return names | write_keys(KEYS, model) | window_keys_of(model) | write_rope(model)


FAMILY = Family(
    name="qwen3",
    model_type="qwen3",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
