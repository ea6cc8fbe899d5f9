"""How a published image classifier wants its images: preprocessor_config.json. No jax here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.published.json_text import parse_json

PROCESSOR_FILE = "preprocessor_config.json"
# Kinds of processors without "ImageProcessor" or "FeatureExtractor" -> whether one number as size is the shorter edge.
_KINDS = {"ViT": False, "ConvNext": True, "Bit": True, "CLIP": True}
# Kinds that keep the centre and scale with the cubic filter where the file does not say it; others do neither.
_CENTRED = ("Bit", "CLIP")
_LINEAR, _CUBIC = 2, 3
_ENDINGS = ("Fast", "Pil", "ImageProcessor", "FeatureExtractor")
# Below this size ConvNext enlarges the image by `crop_pct` and takes its centre, from it on it squeezes the image.
_CONVNEXT_SQUEEZED = 384
_RESAMPLES = range(6)
_SCALE = 1 / 255


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
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]


def read_image_processing(folder: Path) -> ImageProcessing | None:
    """Reads how the images of a published model are made into numbers.

    Args:
        folder: of the model.

    Returns:
        The way; None: the folder has no preprocessor_config.json.

    Raises:
        ConfigError: the file is no JSON, or asks for something that is not known.
    """
    file = folder / PROCESSOR_FILE
    if not file.is_file():
        return None
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not JSON ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no object; fetch it again")
    return _processing(content, file)


def _processing(content: Mapping[str, Any], file: Path) -> ImageProcessing:
    kind = _kind(content, file)
    for key in ("do_pad", "do_reduce_labels"):
        if content.get(key):
            raise _unknown(file, key, content[key], "false")
    shortest_edge, size, crop = None, None, None
    if content.get("do_resize", True):
        shortest_edge, size = _size(content.get("size"), file, is_edge=_KINDS[kind])
    if content.get("do_center_crop", kind in _CENTRED) and kind != "ConvNext":
        _, crop = _size(content.get("crop_size"), file, is_edge=False, key="crop_size")
    if kind == "ConvNext" and shortest_edge is not None:
        edge = shortest_edge
        if edge >= _CONVNEXT_SQUEEZED:
            shortest_edge, size = None, (edge, edge)
        else:
            share = content.get("crop_pct") or 224 / 256
            if not isinstance(share, int | float) or not 0 < share <= 1:
                raise _unknown(file, "crop_pct", share, "a number above 0, up to 1")
            shortest_edge, crop = int(edge / share), (edge, edge)
    resample = content.get("resample", _CUBIC if kind in _CENTRED else _LINEAR)
    if resample not in _RESAMPLES:
        raise _unknown(file, "resample", resample, "0 to 5")
    scale = content.get("rescale_factor", _SCALE) if content.get("do_rescale", True) else 1.0
    if not isinstance(scale, int | float):
        raise _unknown(file, "rescale_factor", scale, "a number")
    mean, deviation = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if content.get("do_normalize", True):
        mean, deviation = (_channels(content, key, file) for key in ("image_mean", "image_std"))
        if not all(deviation):
            raise _unknown(file, "image_std", list(deviation), "three numbers above 0")
    return ImageProcessing(shortest_edge, size, int(resample), crop, float(scale), mean, deviation)


def _kind(content: Mapping[str, Any], file: Path) -> str:
    named = content.get("image_processor_type", content.get("feature_extractor_type"))
    kind = str(named)
    for ending in _ENDINGS:
        kind = kind.removesuffix(ending)
    if kind not in _KINDS:
        known = ", ".join(f"{one}ImageProcessor" for one in _KINDS)
        raise _unknown(file, "image_processor_type", named, f"one of {known}")
    return kind


def _size(given: Any, file: Path, *, is_edge: bool, key: str = "size") -> tuple[int | None, tuple[int, int] | None]:
    """The length of the shorter edge, or (height, width)."""
    if isinstance(given, Mapping):
        if _is_length(given.get("shortest_edge")) and set(given) == {"shortest_edge"}:
            return given["shortest_edge"], None
        if _is_length(given.get("height")) and _is_length(given.get("width")) and len(given) == 2:
            return None, (given["height"], given["width"])
    elif _is_length(given):
        return (given, None) if is_edge else (None, (given, given))
    elif isinstance(given, Sequence) and len(given) == 2 and all(map(_is_length, given)):
        return None, (given[1], given[0])  # older files: width, height
    raise _unknown(file, key, given, '{"shortest_edge": 224} or {"height": 224, "width": 224}')


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _channels(content: Mapping[str, Any], key: str, file: Path) -> tuple[float, float, float]:
    given = content.get(key)
    if not isinstance(given, list) or len(given) != 3 or not all(isinstance(one, int | float) for one in given):
        raise _unknown(file, key, given, "three numbers, one per channel")
    return float(given[0]), float(given[1]), float(given[2])


def _unknown(file: Path, key: str, value: Any, known: str) -> ConfigError:
    return ConfigError(
        f"{file}: {key} is {json.dumps(value)[:60]}, and predict knows {known}; make the arrays yourself (.npy)"
    )
