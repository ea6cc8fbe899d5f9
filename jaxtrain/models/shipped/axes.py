"""The axes tables of the shipped models: parameter path -> logical axes. No jax here: the planner reads them."""

from jaxtrain.config.model import (
    CalledModel,
    EncoderDecoderConfig,
    MLPConfig,
    ModelConfig,
    ResNetConfig,
    TransformerConfig,
    ViTConfig,
)
from jaxtrain.layout.rules import FamilyTable

Axes = dict[str, tuple[str | None, ...]]

# Rows of parameters that a variant lacks (biases, positions, gate) match nothing.
TRANSFORMER: Axes = {
    "embedding": ("vocab", "embed"),
    "positions": (None, "embed"),
    "token_types": (None, "embed"),
    "relative_positions": (None, "heads"),
    "embedding_norm/*": ("embed",),
    "blocks/*norm/scale": ("layers", "embed"),
    "blocks/*norm/bias": ("layers", "embed"),
    "blocks/attention/query_norm/scale": ("layers", "head_dim"),
    "blocks/attention/key_norm/scale": ("layers", "head_dim"),
    "blocks/attention/query/kernel": ("layers", "embed", "heads", "head_dim"),
    "blocks/attention/query/bias": ("layers", "heads", "head_dim"),
    "blocks/attention/key/kernel": ("layers", "embed", "kv_heads", "head_dim"),
    "blocks/attention/key/bias": ("layers", "kv_heads", "head_dim"),
    "blocks/attention/value/kernel": ("layers", "embed", "kv_heads", "head_dim"),
    "blocks/attention/value/bias": ("layers", "kv_heads", "head_dim"),
    "blocks/attention/output/kernel": ("layers", "heads", "head_dim", "embed"),
    "blocks/attention/output/bias": ("layers", "embed"),
    "blocks/mlp/up/kernel": ("layers", "embed", "mlp"),
    "blocks/mlp/up/bias": ("layers", "mlp"),
    "blocks/mlp/gate/kernel": ("layers", "embed", "mlp"),
    "blocks/mlp/gate/bias": ("layers", "mlp"),
    "blocks/mlp/down/kernel": ("layers", "mlp", "embed"),
    "blocks/mlp/down/bias": ("layers", "embed"),
    "output_norm/scale": ("embed",),
    "output_norm/bias": ("embed",),
    "output": ("embed", "vocab"),
    "head/*/kernel": ("embed", None),
    "head/dense/bias": ("embed",),
    "head/hidden/bias": ("embed",),
    "head/norm/*": ("embed",),
    "head/output/bias": (None,),
    "head/bias": ("vocab",),
}

# The blocks and the head are the transformer's.
VIT: Axes = {
    "patches/kernel": (None, "embed"),
    "patches/bias": ("embed",),
    "class_token": ("embed",),
    **{path: row for path, row in TRANSFORMER.items() if path.split("/")[0] in ("positions", "blocks", "output_norm")},
    "head/output/kernel": ("embed", None),
    "head/output/bias": (None,),
}

# These rows take the place of the rows of a transformer's MLP.
EXPERTS: Axes = {
    "blocks/mlp/router/kernel": ("layers", "embed", None),
    "blocks/mlp/up/kernel": ("layers", "experts", "embed", "mlp"),
    "blocks/mlp/gate/kernel": ("layers", "experts", "embed", "mlp"),
    "blocks/mlp/down/kernel": ("layers", "experts", "mlp", "embed"),
}

# Two stacks with the rows of a transformer's, the decoder's with cross-attention.
_STACK = {
    path: row
    for path, row in TRANSFORMER.items()
    if path.split("/")[0] in ("blocks", "output_norm", "relative_positions") and "/query_norm" not in path
    if "/key_norm" not in path
}
ENCODER_DECODER: Axes = {
    "embedding": TRANSFORMER["embedding"],
    "output": TRANSFORMER["output"],
    **{f"{side}/{path}": row for side in ("encoder", "decoder") for path, row in _STACK.items()},
    **{
        "decoder/" + path.replace("attention", "cross_attention"): row
        for path, row in _STACK.items()
        if "attention/" in path
    },
}

# Input channels are sharded over fsdp and output channels over tensor; the stem has too few inputs to be sharded.
RESNET: Axes = {
    "stem/kernel": (None, None, None, "channels_out"),
    "*_first/convs/*/kernel": (None, None, "channels_in", "channels_out"),
    "*_first/shortcut/kernel": (None, None, "channels_in", "channels_out"),
    "*_rest/convs/*/kernel": ("layers", None, None, "channels_in", "channels_out"),
    "*_rest/*": ("layers", "channels_in"),
    "head_kernel": ("channels_in", None),
}


def mlp_axes(num_hidden: int) -> Axes:
    """Make the table of an MLP.

    Over `tensor`, layers alternate between sharded outputs and sharded inputs (Shoeybi et al. 2019).
    """
    axes: Axes = {"output/kernel": ("embed", None), "output/bias": (None,)}
    for index in range(num_hidden):
        shards_outputs = index % 2 == 0
        axes[f"layers/{index}/kernel"] = ("embed", "mlp") if shards_outputs else ("mlp", "embed")
        axes[f"layers/{index}/bias"] = ("mlp",) if shards_outputs else ("embed",)
    return axes


def model_axes(config: ModelConfig) -> Axes:
    """Return the axes table of the model that a config describes."""
    match config:
        case TransformerConfig():
            return FamilyTable(TRANSFORMER if config.experts is None else {**TRANSFORMER, **EXPERTS})
        case EncoderDecoderConfig():
            return FamilyTable(ENCODER_DECODER)
        case ResNetConfig():
            return FamilyTable(RESNET)
        case ViTConfig():
            return FamilyTable(VIT)
        case MLPConfig():
            return mlp_axes(len(config.hidden_dims))
        case CalledModel():
            raise AssertionError("a model of the user's own brings its axes table")
