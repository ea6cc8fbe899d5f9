"""ViT: the vision transformer. No jax here.

Sources: Dosovitskiy et al. 2020 (arXiv 2010.11929), table 1; Touvron et al. 2020 (arXiv 2012.12877) for the tiny size;
the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.published.entries import Entry, Row, Skipped, biased, in_layers, normed, prefixed
from jaxtrain.published.family import Family
from jaxtrain.published.heads import HEAD_KEYS, read_labels
from jaxtrain.published.keys import Fixed, Ignored, Mapped, read_keys, write_keys
from jaxtrain.published.transforms import copy, linear, patches, reshaped

_VIT = dict(kind="vit", patch_size=16, pooling="first", activation="gelu_exact", norm_epsilon=1e-12)

SIZES: dict[str, dict[str, Any]] = {
    "vit_tiny": _VIT | dict(num_layers=12, embed_dim=192, num_heads=3),
    "vit_small": _VIT | dict(num_layers=12, embed_dim=384, num_heads=6),
    "vit_base": _VIT | dict(num_layers=12, embed_dim=768, num_heads=12),
    "vit_large": _VIT | dict(num_layers=24, embed_dim=1024, num_heads=16),
}

KEYS = (
    Mapped("hidden_size", to="embed_dim", default=768),
    Mapped("num_hidden_layers", to="num_layers", default=12),
    Mapped("num_attention_heads", to="num_heads", default=12),
    Mapped("intermediate_size", to="mlp_dim", default=3072),
    Mapped(
        "hidden_act",
        to="activation",
        default="gelu",
        values={"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"},
    ),
    Mapped("hidden_dropout_prob", to="dropout", default=0.0),
    Mapped("layer_norm_eps", to="norm_epsilon", default=1e-12),
    Mapped("image_size", to="image_size", default=224),
    Mapped("patch_size", to="patch_size", default=16),
    Mapped("num_channels", to="channels", default=3),
    Fixed("qkv_bias", (True,), reason="it leaves biases out of queries, keys and values"),
    Ignored("attention_probs_dropout_prob", reason="drops attention weights in training only"),
    Ignored("encoder_stride", reason="is of a head that restores masked patches"),
    Ignored("pooler_output_size", reason="is of a layer that classifiers do not have"),
    Ignored("pooler_act", reason="is of a layer that classifiers do not have"),
    *HEAD_KEYS,
)  # fmt: skip


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family.

    A model without a head leaves the number of classes to the data.
    """
    ours, file = read_keys(KEYS, config, family="vit")
    architecture = next(iter(file["architectures"] or ()), "ViTModel")
    if architecture not in ("ViTForImageClassification", "ViTModel"):
        raise ConfigError(
            f"config.json has architectures: {architecture}, which is not supported; known are "
            "ViTForImageClassification, ViTModel"
        )
    size, patch = int(ours["image_size"]), int(ours["patch_size"])
    if size % patch:
        raise ConfigError(
            f"config.json has image_size: {size} and patch_size: {patch}, whose patches leave pixels out at the edge, "
            "which is not supported; image_size is to be a multiple of patch_size"
        )
    classes = read_labels(file) if architecture == "ViTForImageClassification" else None
    return dict(kind="vit", pooling="first", num_classes=classes) | ours


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    classes = range(model["num_classes"] or 0)
    said: dict[str, Any] = dict(architectures=["ViTForImageClassification"], model_type="vit")
    labels = dict(
        id2label={str(label): f"LABEL_{label}" for label in classes},
        label2id={f"LABEL_{label}": label for label in classes},
    )
    return said | write_keys(KEYS, model) | labels


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    D, P, C, size = (int(model[key]) for key in ("embed_dim", "patch_size", "channels", "image_size"))
    count = 1 + (size // P) ** 2
    encoder = (
        Entry("class_token", "embeddings.cls_token", reshaped((1, 1, D), (D,))),
        Entry("positions", "embeddings.position_embeddings", reshaped((1, count, D), (count, D))),
        Entry("patches/kernel", "embeddings.patch_embeddings.projection.weight", patches(D, C, P)),
        Entry("patches/bias", "embeddings.patch_embeddings.projection.bias", copy(D)),
        *_blocks(model),
        *normed("output_norm", "layernorm", D),
        Skipped(r"pooler\.dense\.(weight|bias)", "a classifier has no such layer"),
    )
    rows = prefixed(encoder, written="vit.", read=("vit.", ""))
    classes = model["num_classes"]
    if classes is None:
        return rows
    return (
        *rows,
        Entry("head/output/kernel", "classifier.weight", linear((D,), (int(classes),))),
        Entry("head/output/bias", "classifier.bias", copy(int(classes))),
    )


def _blocks(model: Mapping[str, Any]) -> tuple[Row, ...]:
    D, H, L = (int(model[key]) for key in ("embed_dim", "num_heads", "num_layers"))
    K, F = D // H, int(model["mlp_dim"] or 4 * D)
    rows = [
        *normed("blocks/attention_norm", "layernorm_before", D),
        *biased("blocks/attention/output", "attention.output.dense", linear((H, K), (D,)), (D,)),
        *normed("blocks/mlp_norm", "layernorm_after", D),
        *biased("blocks/mlp/up", "intermediate.dense", linear((D,), (F,)), (F,)),
        *biased("blocks/mlp/down", "output.dense", linear((F,), (D,)), (D,)),
    ]
    for name in ("query", "key", "value"):
        rows += biased(f"blocks/attention/{name}", f"attention.attention.{name}", linear((D,), (H, K)), (H, K))
    return in_layers(rows, "encoder.layer.{layer}.", L)


FAMILY = Family(
    name="vit",
    model_type="vit",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
