"""The published sizes of the shipped models: name -> the keys of a model group. No jax here."""

from collections.abc import Mapping

from pydantic_core import PydanticCustomError

from jaxtrain.published.families.table import sizes_of

_GPT3 = dict(
    vocab_size=50257, max_sequence_length=2048, position="learned", norm="layernorm",
    activation="gelu", tie_embeddings=True, bias=True, norm_epsilon=1e-5,
)  # fmt: skip

# Key of a model group -> value.
Size = dict[str, object]


def _row(family: Mapping[str, object], layers: int, width: int, heads: int, **more: object) -> Size:
    return {**family} | dict(num_layers=layers, embed_dim=width, num_heads=heads) | more


# Source: GPT-3, Brown et al. 2020, table 2.1 (its 13B row is 5140 wide with 40 heads of 128, so num_heads x head_dim is
# not the width; all layers have dense attention here). It has no weights that were published.
TRANSFORMER_SIZES: dict[str, Size] = {
    "gpt3_125m": _row(_GPT3, 12, 768, 12),
    "gpt3_350m": _row(_GPT3, 24, 1024, 16),
    "gpt3_760m": _row(_GPT3, 24, 1536, 16),
    "gpt3_1.3b": _row(_GPT3, 24, 2048, 24, head_dim=128),
    "gpt3_2.7b": _row(_GPT3, 32, 2560, 32),
    "gpt3_6.7b": _row(_GPT3, 32, 4096, 32),
    "gpt3_13b": _row(_GPT3, 40, 5140, 40, head_dim=128),
    "gpt3_175b": _row(_GPT3, 96, 12288, 96),
    **sizes_of("transformer"),
}

VIT_SIZES: dict[str, Size] = dict(sizes_of("vit"))
RESNET_SIZES: dict[str, Size] = dict(sizes_of("resnet"))
ALL_SIZES: dict[str, Size] = {**TRANSFORMER_SIZES, **VIT_SIZES, **RESNET_SIZES}


def fill_size(values: object, sizes: Mapping[str, Size]) -> object:
    """Returns the values with those of the named size where the user gave none."""
    if not isinstance(values, dict) or not isinstance(values.get("size"), str):
        return values
    if values["size"] not in sizes:
        raise PydanticCustomError("unknown_size", "unknown size; known: {expected}", {"expected": ", ".join(sizes)})
    return sizes[values["size"]] | values
