"""The published sizes of the shipped models: name -> the keys of a model group. No jax here."""

from collections.abc import Mapping

from pydantic_core import PydanticCustomError

from jaxtrain.published.families.table import sizes_of

_GPT = dict(
    vocab_size=50257, max_sequence_length=1024, position="learned", norm="layernorm",
    activation="gelu", tie_embeddings=True, bias=True, norm_epsilon=1e-5,
)  # fmt: skip
_GPT3 = _GPT | dict(max_sequence_length=2048)
_MIXTRAL = dict(
    vocab_size=32000, max_sequence_length=32768, position="rotary", rope_theta=1e6, norm="rmsnorm",
    norm_epsilon=1e-5, activation="swiglu", tie_embeddings=False, bias=False, num_kv_heads=8, head_dim=128,
    experts=dict(num_experts=8, experts_per_token=2),
)  # fmt: skip


# Key of a model group -> value.
Size = dict[str, object]


def _row(family: Mapping[str, object], layers: int, width: int, heads: int, **more: object) -> Size:
    return {**family} | dict(num_layers=layers, embed_dim=width, num_heads=heads) | more


# Sources: GPT-2, Radford et al. 2019 (openai/gpt-2 hparams); GPT-3, Brown et al. 2020, table 2.1 (its 13B row is
# 5140 wide with 40 heads of 128, so num_heads x head_dim is not the width; all layers have dense attention here);
# Mixtral v0.1 (the base models): the config.json published with each model.
TRANSFORMER_SIZES: dict[str, Size] = {
    "gpt2": _row(_GPT, 12, 768, 12),
    "gpt2_medium": _row(_GPT, 24, 1024, 16),
    "gpt2_large": _row(_GPT, 36, 1280, 20),
    "gpt2_xl": _row(_GPT, 48, 1600, 25),
    "gpt3_125m": _row(_GPT3, 12, 768, 12),
    "gpt3_350m": _row(_GPT3, 24, 1024, 16),
    "gpt3_760m": _row(_GPT3, 24, 1536, 16),
    "gpt3_1.3b": _row(_GPT3, 24, 2048, 24, head_dim=128),
    "gpt3_2.7b": _row(_GPT3, 32, 2560, 32),
    "gpt3_6.7b": _row(_GPT3, 32, 4096, 32),
    "gpt3_13b": _row(_GPT3, 40, 5140, 40, head_dim=128),
    "gpt3_175b": _row(_GPT3, 96, 12288, 96),
    **sizes_of("transformer"),
    "mixtral_8x7b": _row(_MIXTRAL, 32, 4096, 32, mlp_dim=14336),
    "mixtral_8x22b": _row(_MIXTRAL, 56, 6144, 48, mlp_dim=16384, max_sequence_length=65536),
}

# Source: He et al. 2015, table 1; models of 50 layers or more have bottleneck blocks.
RESNET_SIZES: dict[str, Size] = {
    "resnet18": dict(stage_blocks=[2, 2, 2, 2], bottleneck=False),
    "resnet34": dict(stage_blocks=[3, 4, 6, 3], bottleneck=False),
    "resnet50": dict(stage_blocks=[3, 4, 6, 3], bottleneck=True),
    "resnet101": dict(stage_blocks=[3, 4, 23, 3], bottleneck=True),
}


def fill_size(values: object, sizes: Mapping[str, Size]) -> object:
    """Returns the values with those of the named size where the user gave none."""
    if not isinstance(values, dict) or not isinstance(values.get("size"), str):
        return values
    if values["size"] not in sizes:
        raise PydanticCustomError("unknown_size", "unknown size; known: {expected}", {"expected": ", ".join(sizes)})
    return sizes[values["size"]] | values
