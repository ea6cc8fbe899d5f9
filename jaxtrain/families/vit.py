"""ViT, the vision transformer; and how published image classifiers want their images. No jax here.

Sources: Dosovitskiy et al. 2020 (arXiv 2010.11929), table 1; Touvron et al. 2020 (arXiv 2012.12877) for the tiny size;
the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import (
    HEAD_KEYS,
    Family,
    fixed,
    ignored,
    labels_of,
    mapped,
    read_architecture,
    read_labels,
    size,
    size_keys,
)
from jaxtrain.formats.rows import (
    Entry,
    Row,
    Skipped,
    biased,
    block_rows,
    dims,
    in_layers,
    linear,
    normed,
    patches,
    prefixed,
    reshaped,
)

_FIXED = dict(kind="vit", pooling="first")
_ACTIVATIONS = {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}
_VIT = _FIXED | dict(patch_size=16, activation="gelu_exact", norm_epsilon=1e-12)


def _read(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the number of classes; a model without a head leaves it to the data."""
    found = read_architecture(file, "ViTForImageClassification", "ViTModel")
    return dict(num_classes=None if found == "ViTModel" else read_labels(file))


_NAMES = {
    "attention_norm": "layernorm_before", "attention/output": "attention.output.dense", "mlp_norm": "layernorm_after",
    "mlp/up": "intermediate.dense", "mlp/down": "output.dense", "attention/query": "attention.attention.query",
    "attention/key": "attention.attention.key", "attention/value": "attention.attention.value",
}  # fmt: skip


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    (D, H, L), (P, C, side) = dims(model, "DHL"), (int(model[key]) for key in ("patch_size", "channels", "image_size"))
    count, said = 1 + (side // P) ** 2, dict(num_kv_heads=H, head_dim=D // H, bias=True, norm="layernorm")
    blocks = block_rows({**model, **said}, _NAMES, beside=True)
    encoder = (
        Entry("class_token", "embeddings.cls_token", reshaped((1, 1, D), (D,))),
        Entry("positions", "embeddings.position_embeddings", reshaped((1, count, D), (count, D))),
        *biased("patches", "embeddings.patch_embeddings.projection", patches(D, C, P), (D,)),
        *in_layers(blocks, "encoder.layer.{layer}.", L),
        *normed("output_norm", "layernorm", D),
        Skipped(r"pooler\.dense\.(weight|bias)"),  # a classifier has no such layer
    )
    rows = prefixed(encoder, written="vit.", read=("vit.", ""))
    if (classes := model["num_classes"]) is None:
        return rows
    return (*rows, *biased("head/output", "classifier", linear((D,), (int(classes),)), (int(classes),)))


FAMILY = Family(
    name="vit",
    architecture="ViTForImageClassification",
    keys=(
        *size_keys(size(_VIT, 12, 768, 12), dict(norm_epsilon="layer_norm_eps")),
        mapped("hidden_act", "activation", "gelu", _ACTIVATIONS),
        mapped("hidden_dropout_prob", "dropout", 0.0),
        mapped("image_size", "image_size", 224),
        mapped("patch_size", "patch_size", 16),
        mapped("num_channels", "channels", 3),
        fixed("qkv_bias", True),
        *ignored("attention_probs_dropout_prob", "encoder_stride", "pooler_output_size", "pooler_act"),
        *HEAD_KEYS,
    ),
    tensors=_tensors,
    fixed=_FIXED,
    read=_read,
    write=lambda model: labels_of(model["num_classes"]),
    sizes={
        "vit_tiny": size(_VIT, 12, 192, 3),
        "vit_small": size(_VIT, 12, 384, 6),
        "vit_base": size(_VIT, 12, 768, 12),
        "vit_large": size(_VIT, 24, 1024, 16),
    },
)
