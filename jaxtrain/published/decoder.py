"""What the families after Llama share: names of keys in config.json, and which layers have a window. No jax here."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.published.keys import Default, Key, Mapped

SILU = {"silu": "swiglu", "swish": "swiglu"}
"""Names of the activation of Llama's MLP."""
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
"""Names of GELU in its tanh form."""
NO_DROPOUT = "a dropout rate of training, which model.dropout sets"
"""Why the rates of dropout are left out."""


def decoder_keys(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: Default,
    head_dim: Default,
    max_position_embeddings: int,
    rms_norm_eps: float,
    tie_word_embeddings: bool,
    mlp_key: str = "intermediate_size",
) -> tuple[Key, ...]:
    """Returns the declarations of the sizes, each with the family's default.

    Args:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads: Defaults of these keys.
        num_key_value_heads, head_dim: Defaults, or functions of the values read before.
        max_position_embeddings, rms_norm_eps, tie_word_embeddings: Defaults of these keys.
        mlp_key: The key of the MLP's width, whose default is `intermediate_size`.
    """
    return (
        Mapped("vocab_size", to="vocab_size", default=vocab_size),
        Mapped("hidden_size", to="embed_dim", default=hidden_size),
        Mapped(mlp_key, to="mlp_dim", default=intermediate_size),
        Mapped("num_hidden_layers", to="num_layers", default=num_hidden_layers),
        Mapped("num_attention_heads", to="num_heads", default=num_attention_heads),
        Mapped("num_key_value_heads", to="num_kv_heads", default=num_key_value_heads),
        Mapped("head_dim", to="head_dim", default=head_dim),
        Mapped("max_position_embeddings", to="max_sequence_length", default=max_position_embeddings),
        Mapped("rms_norm_eps", to="norm_epsilon", default=rms_norm_eps),
        Mapped("tie_word_embeddings", to="tie_embeddings", default=tie_word_embeddings),
    )


def as_many_as_heads(file: Mapping[str, Any]) -> int:
    """The default of `num_key_value_heads` in most families."""
    return int(file["num_attention_heads"])


def split_width(file: Mapping[str, Any]) -> int:
    """The default of `head_dim` in most families."""
    return int(file["hidden_size"]) // int(file["num_attention_heads"])


def no_tokens(model: Mapping[str, Any], **defaults: int) -> dict[str, None]:
    """Returns null for the keys of special tokens whose default in the family is no token of a model.

    Args:
        model: Our model group.
        defaults: Key of config.json (eos_token_id) -> the id that a file without the key stands for.
    """
    return {name: None for name, token in defaults.items() if token >= int(model["vocab_size"])}


def read_windows(layer_types: object, window: int | None, *, layers: int) -> dict[str, Any]:
    """Returns `sliding_window` and `local_layers` of our model group.

    Args:
        layer_types: "sliding_attention" or "full_attention" for each layer.
        window: Of the sliding layers.
        layers: Number of layers.

    Raises:
        ConfigError: If there are other types, another number of them, or no window where one is needed.
    """
    known = {"sliding_attention": 1, "full_attention": 0}
    kinds = layer_types if isinstance(layer_types, Sequence) and not isinstance(layer_types, str) else ()
    if len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ConfigError(
            f"config.json has layer_types: {layer_types}, but it takes sliding_attention or full_attention for each "
            f"of the {layers} layers"
        )
    pattern = [known[kind] for kind in kinds]
    if not any(pattern):
        return {"sliding_window": None, "local_layers": None}
    if window is None:
        raise ConfigError("config.json has layers of type sliding_attention but no sliding_window; write its size")
    if all(pattern):
        return {"sliding_window": window, "local_layers": None}
    return {"sliding_window": None, "local_layers": {"pattern": shortest(pattern), "window": window}}


def shortest(pattern: Sequence[int]) -> tuple[int, ...]:
    """Returns the shortest pattern whose repetition gives the same layers."""
    for period in range(1, len(pattern)):
        if all(kind == pattern[at % period] for at, kind in enumerate(pattern)):
            return tuple(pattern[:period])
    return tuple(pattern)


def write_windows(model: Mapping[str, Any]) -> tuple[list[str], int | None]:
    """Returns `layer_types` and `sliding_window` of a model group, the inverse of `read_windows`."""
    layers, local = int(model["num_layers"]), model["local_layers"]
    if local is None:
        window = model["sliding_window"]
        return ["full_attention" if window is None else "sliding_attention"] * layers, window
    kinds = ("full_attention", "sliding_attention")
    pattern = local["pattern"]
    return [kinds[pattern[at % len(pattern)]] for at in range(layers)], local["window"]
