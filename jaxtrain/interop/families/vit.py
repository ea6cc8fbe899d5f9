"""ViT, the vision transformer; and how published image classifiers want their images. No jax here.

Sources: Dosovitskiy et al. 2020 (arXiv 2010.11929), table 1; Touvron et al. 2020 (arXiv 2012.12877) for the tiny size;
the config.json published with each model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.interop.families.family import Family, labels_of, read_architecture, read_labels
from jaxtrain.interop.families.keys import HEAD_KEYS, fixed, ignored, mapped
from jaxtrain.interop.formats.entries import Entry, Row, Skipped, biased, in_layers, normed, prefixed
from jaxtrain.interop.formats.hub import read_json
from jaxtrain.interop.formats.transforms import linear, patches, reshaped

_FIXED = dict(kind="vit", pooling="first")
_VIT = _FIXED | dict(patch_size=16, activation="gelu_exact", norm_epsilon=1e-12)


def _read(ours: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the number of classes; a model without a head leaves it to the data."""
    size, patch = ours["image_size"], ours["patch_size"]
    if size % patch:
        raise ConfigError(f"config.json has image_size: {size}, which is no multiple of its patch_size: {patch}")
    found = read_architecture(file, "ViTForImageClassification", "ViTModel")
    return dict(num_classes=None if found == "ViTModel" else read_labels(file))


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    return labels_of(model["num_classes"])


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    D, P, C, size = (int(model[key]) for key in ("embed_dim", "patch_size", "channels", "image_size"))
    H, L = int(model["num_heads"]), int(model["num_layers"])
    K, F, count = D // H, int(model["mlp_dim"] or 4 * D), 1 + (size // P) ** 2
    blocks = [
        *normed("blocks/attention_norm", "layernorm_before", D),
        *biased("blocks/attention/output", "attention.output.dense", linear((H, K), (D,)), (D,)),
        *normed("blocks/mlp_norm", "layernorm_after", D),
        *biased("blocks/mlp/up", "intermediate.dense", linear((D,), (F,)), (F,)),
        *biased("blocks/mlp/down", "output.dense", linear((F,), (D,)), (D,)),
    ]
    for name in ("query", "key", "value"):
        blocks += biased(f"blocks/attention/{name}", f"attention.attention.{name}", linear((D,), (H, K)), (H, K))
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
        mapped("hidden_size", "embed_dim", 768),
        mapped("num_hidden_layers", "num_layers", 12),
        mapped("num_attention_heads", "num_heads", 12),
        mapped("intermediate_size", "mlp_dim", 3072),
        mapped(
            "hidden_act",
            "activation",
            "gelu",
            {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"},
        ),
        mapped("hidden_dropout_prob", "dropout", 0.0),
        mapped("layer_norm_eps", "norm_epsilon", 1e-12),
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
    write=_write,
    sizes={
        "vit_tiny": _VIT | dict(num_layers=12, embed_dim=192, num_heads=3),
        "vit_small": _VIT | dict(num_layers=12, embed_dim=384, num_heads=6),
        "vit_base": _VIT | dict(num_layers=12, embed_dim=768, num_heads=12),
        "vit_large": _VIT | dict(num_layers=24, embed_dim=1024, num_heads=16),
    },
)

PROCESSOR_FILE = "preprocessor_config.json"
# Kinds of processors -> whether one number as size is the shorter edge.
_KINDS = {"ViT": False, "ConvNext": True, "Bit": True, "CLIP": True}
# Kinds that keep the centre and scale with the cubic filter where the file does not say it; others do neither.
_CENTRED = ("Bit", "CLIP")
_LINEAR, _CUBIC = 2, 3
# From this size on ConvNext squeezes the image; below it enlarges the image by `crop_pct` and takes its centre.
_CONVNEXT_SQUEEZED = 384


@dataclass(frozen=True)
class ImageProcessing:
    """The way from the pixels of an image to what a model reads.

    Attributes:
        shortest_edge: pixels that the shorter edge is scaled to, at the same aspect ratio; None: see `size`.
        size: (height, width) that the image is squeezed into; None: it is not.
        resample: number of the filter, as Pillow counts them.
        crop: (height, width) of the centre that is kept; None: all.
        scale: what pixels of 0 to 255 are multiplied by.
        mean, deviation: of each channel, after that.
    """

    shortest_edge: int | None
    size: tuple[int, int] | None
    resample: int
    crop: tuple[int, int] | None
    scale: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


def read_image_processing(folder: Path) -> ImageProcessing | None:
    """Reads how a published model wants its images; None: the folder has no preprocessor_config.json.

    Raises:
        ConfigError: The file is no JSON, or asks for something that is not known.
    """
    file = folder / PROCESSOR_FILE
    if not file.is_file():
        return None
    content = read_json(file)
    kind = str(content.get("image_processor_type", content.get("feature_extractor_type")))
    for ending in ("Fast", "Pil", "ImageProcessor", "FeatureExtractor"):
        kind = kind.removesuffix(ending)
    if kind not in _KINDS:
        raise _unknown(file, "image_processor_type", kind, f"{', '.join(_KINDS)}")
    if content.get("do_pad"):
        raise _unknown(file, "do_pad", content["do_pad"], "false")
    edge, size, crop = None, None, None
    if content.get("do_resize", True):
        edge, size = _size(file, content, "size", is_edge=_KINDS[kind])
    if kind == "ConvNext" and edge is not None:
        if edge >= _CONVNEXT_SQUEEZED:
            edge, size = None, (edge, edge)
        else:
            edge, crop = int(edge / (content.get("crop_pct") or 224 / 256)), (edge, edge)
    elif content.get("do_center_crop", kind in _CENTRED):
        _, crop = _size(file, content, "crop_size", is_edge=False)
    scale = content.get("rescale_factor", 1 / 255) if content.get("do_rescale", True) else 1.0
    mean, deviation = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if content.get("do_normalize", True):
        mean, deviation = (tuple(content.get(key) or ()) for key in ("image_mean", "image_std"))
        if len(mean) != 3 or len(deviation) != 3:
            raise _unknown(file, "image_mean, image_std", [mean, deviation], "three numbers each")
    resample = content.get("resample", _CUBIC if kind in _CENTRED else _LINEAR)
    return ImageProcessing(edge, size, resample, crop, scale, mean, deviation)


def _size(file: Path, content: Mapping[str, Any], key: str, *, is_edge: bool) -> tuple[Any, tuple[int, int] | None]:
    """The length of the shorter edge, or (height, width)."""
    match content.get(key):
        case {"shortest_edge": int(edge), **rest} if not rest:
            return edge, None
        case {"height": int(height), "width": int(width)}:
            return None, (height, width)
        case int(edge):
            return (edge, None) if is_edge else (None, (edge, edge))
        case [int(width), int(height)]:  # older files
            return None, (height, width)
        case other:
            raise _unknown(file, key, other, '{"shortest_edge": 224} or {"height": 224, "width": 224}')


def _unknown(file: Path, key: str, value: Any, known: str) -> ConfigError:
    shown = json.dumps(value, default=str)[:60]
    return ConfigError(f"{file}: {key} is {shown}, and predict knows {known}; make the arrays yourself (.npy)")
