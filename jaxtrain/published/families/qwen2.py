"""Qwen2 and Qwen2.5. No jax here.

Sources: the config.json published with each model (the base models).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.published.decoder import SILU, decoder_keys, read_windows, split_width, write_windows
from jaxtrain.published.families.llama import tensors
from jaxtrain.published.family import Family
from jaxtrain.published.keys import Fixed, Mapped, Own, read_keys, write_keys
from jaxtrain.published.rope import read_rope, rope_keys, write_rope

_COMMON = dict(
    vocab_size=151936, max_sequence_length=32768, position="rotary", rope_theta=1e6, norm="rmsnorm",
    norm_epsilon=1e-6, activation="swiglu", bias="qkv", tie_embeddings=True,
)  # fmt: skip


def _row(layers: int, width: int, heads: int, kv_heads: int, mlp: int, **more: object) -> dict[str, Any]:
    sizes = dict(num_layers=layers, embed_dim=width, num_heads=heads, num_kv_heads=kv_heads, mlp_dim=mlp)
    return _COMMON | sizes | more


_LARGE = dict(vocab_size=152064, tie_embeddings=False, max_sequence_length=131072)

SIZES: dict[str, dict[str, Any]] = {
    "qwen2_0.5b": _row(24, 896, 14, 2, 4864, max_sequence_length=131072),
    "qwen2_1.5b": _row(28, 1536, 12, 2, 8960, max_sequence_length=131072),
    "qwen2_7b": _row(28, 3584, 28, 4, 18944, **_LARGE),
    "qwen2_72b": _row(80, 8192, 64, 8, 29568, **_LARGE, norm_epsilon=1e-5),
    "qwen2.5_0.5b": _row(24, 896, 14, 2, 4864),
    "qwen2.5_1.5b": _row(28, 1536, 12, 2, 8960, max_sequence_length=131072),
    "qwen2.5_3b": _row(36, 2048, 16, 2, 11008),
    "qwen2.5_7b": _row(28, 3584, 28, 4, 18944, **_LARGE),
    "qwen2.5_14b": _row(48, 5120, 40, 8, 13824, **_LARGE, norm_epsilon=1e-5),
    "qwen2.5_32b": _row(64, 5120, 40, 8, 27648, **_LARGE, norm_epsilon=1e-5),
    "qwen2.5_72b": _row(80, 8192, 64, 8, 29568, **_LARGE, norm_epsilon=1e-5),
}

WINDOW_KEYS = (
    Own("use_sliding_window", default=False),
    Own("sliding_window", default=4096),
    Own("max_window_layers", default=28),
    Own("layer_types", default=None),
)

KEYS = (
    *decoder_keys(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, head_dim=split_width, max_position_embeddings=32768, rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    ),
    Mapped("hidden_act", to="activation", default="silu", values=SILU),
    *WINDOW_KEYS,
    *rope_keys(10000.0),
    Fixed("attention_dropout", (0.0, 0), reason="it drops attention weights in training"),
    Fixed("use_mrope", (False,), reason="it gives images positions in three dimensions"),
)  # fmt: skip


def windows_of(file: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the windows of a config.json: of the layers from max_window_layers on, where it uses any."""
    layers, window = int(file["num_hidden_layers"]), file["sliding_window"]
    if not file["use_sliding_window"] or window is None:
        return {"sliding_window": None, "local_layers": None}
    first = int(file["max_window_layers"])
    types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    return read_windows(file["layer_types"] or types, window, layers=layers)


def window_keys_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of the windows of a model group, the inverse of `windows_of`."""
    types, window = write_windows(model)
    first = types.index("sliding_attention") if window is not None else len(types)
    return dict(
        use_sliding_window=window is not None, sliding_window=window, max_window_layers=first, layer_types=types
    )


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="qwen2")
    fixed = dict(kind="transformer", position="rotary", norm="rmsnorm", bias="qkv")
    length = int(file["max_position_embeddings"])
    return fixed | ours | windows_of(file) | read_rope(file, family="qwen2", original_length=length)


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    names = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    written = write_keys(KEYS, model)
    # transformers divides the width by the heads, and knows no key for another width of a head.
    if written["head_dim"] == written["hidden_size"] // written["num_attention_heads"]:
        del written["head_dim"]
    return names | written | window_keys_of(model) | write_rope(model)


FAMILY = Family(
    name="qwen2",
    model_type="qwen2",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
