"""Histograms and images that a callback logs, as metrics.jsonl holds them: {"counts", "edges"} and {"png"}."""

import base64
import io
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.errors import ConfigError

_NUM_BINS = 64
# Larger images are averaged down, so that metrics.jsonl stays readable.
_MOST_PIXELS = 512

Media = Mapping[str, Any]


def sorted_values(values: Mapping[str, Any], *, inside: str = "") -> tuple[dict[str, float], dict[str, Media]]:
    """Numbers, and histograms and images, by name, of what `Moment.log` takes; `inside` is the name of their tree.

    Every process calls this, since arrays may be on all of them. A ConfigError names a value that is none of these.
    """
    numbers: dict[str, float] = {}
    media: dict[str, Media] = {}
    for name, value in values.items():
        if value is None:  # a frozen parameter among gradients
            continue
        if isinstance(value, Mapping):
            more = sorted_values(value, inside=f"{inside}{name}/")
            numbers, media = numbers | more[0], media | more[1]
            continue
        is_pair = isinstance(value, tuple) and len(value) == 2
        array = _on_host(value[0] if is_pair else value)
        if array.dtype.kind not in "biuf":
            raise ConfigError(f"moment.log: {inside}{name} is {type(value).__name__}; log numbers or arrays of numbers")
        if array.ndim == 0:
            numbers[inside + name] = array.item()
        elif is_pair:
            media[inside + name] = {"counts": array.tolist(), "edges": _on_host(value[1]).tolist()}
        elif array.ndim == 1 or inside:
            counts, edges = np.histogram(array[np.isfinite(array)].astype(np.float64), bins=_NUM_BINS)
            edges = [float(f"{edge:.6g}") for edge in edges]
            media[inside + name] = {"counts": counts.tolist(), "edges": edges}
        elif (png := thumbnail(array, most_pixels=_MOST_PIXELS)) is not None:
            media[inside + name] = {"png": base64.b64encode(png).decode("ascii")}
        else:
            raise ConfigError(
                f"moment.log: {name} {list(array.shape)} is not an image [H, W, 1 or 3]; log {name}[0], {name}.ravel()"
            )
    return numbers, media


def thumbnail(values: np.ndarray, *, most_pixels: int = 32) -> bytes | None:
    """Draw values, [H, W], [H, W, 1] or [H, W, 3] of any real dtype, as a small PNG; None where they are no picture.

    The smallest value becomes black and the largest white; uint8 is drawn as it is. Larger pictures are averaged down.
    """
    from PIL import Image

    if values.ndim == 3 and values.shape[-1] == 1:
        values = values[..., 0]
    is_picture = values.ndim == 2 or (values.ndim == 3 and values.shape[-1] == 3)
    if not is_picture or min(values.shape[:2]) < 2 or not np.isfinite(values).all():
        return None
    if values.dtype != np.uint8:
        low, high = float(values.min()), float(values.max())
        values = np.rint(255 * (values.astype(np.float64) - low) / ((high - low) or 1.0)).astype(np.uint8)
    image = Image.fromarray(values)
    image.thumbnail((most_pixels, most_pixels), Image.Resampling.BOX)
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True)
    return content.getvalue()


def _on_host(value: Any) -> np.ndarray:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        from jax.experimental import multihost_utils

        value = multihost_utils.process_allgather(value, tiled=True)
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.kind == "V" else array  # bfloat16, which NumPy does not know
