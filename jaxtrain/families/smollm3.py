"""SmolLM3. No jax here.

Source: the config.json published with the model (the base model).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, decoder_keys, ignored, no_ids, own, rope_keys, size
from jaxtrain.families.llama import BIAS_KEYS, read_bias, tensors, write_bias
from jaxtrain.formats.rope import read_windows, shortest_pattern, write_windows

_FIXED = dict(position="rotary", norm="rmsnorm")
_3B = dict(
    vocab_size=128256, max_sequence_length=65536, rope_theta=5e6, rope_layers=(1, 1, 1, 0), norm_epsilon=1e-6,
    activation="swiglu", bias=False, tie_embeddings=True, num_kv_heads=4, mlp_dim=11008,
)  # fmt: skip


def by_interval(file: Mapping[str, Any]) -> list[int]:
    """Returns which layers are rotated (1) in a file that says how often one is not."""
    every = int(file["no_rope_layer_interval"])
    return [int((layer + 1) % every != 0) for layer in range(int(file["num_hidden_layers"]))]


def _read(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the layers that are rotated (1 in no_rope_layers); of the others, those with a window by default."""
    window = file["sliding_window"] if file["use_sliding_window"] else None
    rotated = [int(bool(file["no_rope_layers"][layer])) for layer in range(int(file["num_hidden_layers"]))]
    kinds = ["full_attention" if one or window is None else "sliding_attention" for one in rotated]
    rope_layers = None if all(rotated) else shortest_pattern(rotated)
    return dict(rope_layers=rope_layers) | read_windows(file["layer_types"] or kinds, window) | read_bias(file)


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    windows, pattern = write_windows(model), model["rope_layers"] or (1,)
    rotated = [pattern[layer % len(pattern)] for layer in range(int(model["num_layers"]))]
    windows |= dict(use_sliding_window=windows["sliding_window"] is not None)
    ids = no_ids(model, pad_token_id=128004, bos_token_id=128000, eos_token_id=128001)
    return dict(no_rope_layers=rotated) | windows | write_bias(model) | ids


_DEFAULTS = size(_3B, 36, 2048, 16, max_sequence_length=32768)
FAMILY = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    keys=(
        *(*decoder_keys(_DEFAULTS, write_head_dim=False), *rope_keys(2e6), *BIAS_KEYS),
        *(own("no_rope_layer_interval", 4), own("no_rope_layers", by_interval)),
        *(own("layer_types"), own("use_sliding_window", False), own("sliding_window")),
        *ignored("max_window_layers", "pretraining_tp"),
    ),
    tensors=tensors,
    fixed=_FIXED,
    rotary=True,
    read=_read,
    write=_write,
    sizes={"smollm3_3b": size(_FIXED | _3B, 36, 2048, 16)},
)
