"""Small pictures of rows as PNG files. No jax here."""

import io

import numpy as np

_MOST_PIXELS = 32


def thumbnail(values: np.ndarray, *, most_pixels: int = _MOST_PIXELS) -> bytes | None:
    """Draw a row of inputs as a small PNG.

    Args:
        values: [H, W], [H, W, 1] or [H, W, 3], of any real dtype. Its smallest value becomes black and its largest
            white; uint8 is drawn as it is.
        most_pixels: larger pictures are averaged down to at most this many pixels in height and width.

    Returns:
        The content of a PNG file; None where the values are no picture.
    """
    values = np.asarray(values)
    if values.ndim == 2:
        values = values[..., None]
    if values.ndim != 3 or values.shape[-1] not in (1, 3) or 0 in values.shape or min(values.shape[:2]) < 2:
        return None
    is_drawn = values.dtype == np.uint8
    try:
        pixels = _averaged(values.astype(np.float64), most_pixels)
    except (TypeError, ValueError):
        return None
    if not np.isfinite(pixels).all():
        return None
    if not is_drawn:
        low, high = pixels.min(), pixels.max()
        pixels = 255 * (pixels - low) / (high - low if high > low else 1.0)
    return _png(np.rint(pixels).astype(np.uint8))


def _averaged(pixels: np.ndarray, most: int) -> np.ndarray:
    """Average over equal blocks, so that height and width are at most `most`."""
    for dim in (0, 1):
        size = pixels.shape[dim]
        if size > most:
            starts = np.arange(most) * size // most
            counts = np.diff(starts, append=size)
            shape = [1, 1, 1]
            shape[dim] = most
            pixels = np.add.reduceat(pixels, starts, axis=dim) / counts.reshape(shape)
    return pixels


def _png(pixels: np.ndarray) -> bytes:
    """Encode uint8 [H, W, 1] or [H, W, 3]."""
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(content, "PNG", optimize=True)
    return content.getvalue()
