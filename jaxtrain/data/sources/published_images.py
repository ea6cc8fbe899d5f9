"""Image files as a published model wants them."""

from collections.abc import Sequence
from pathlib import Path

import grain
import numpy as np

from jaxtrain.data.sources.images import decoded_image
from jaxtrain.errors import DataError
from jaxtrain.interop.families.vit import ImageProcessing


def published_images(files: Sequence[Path], processing: ImageProcessing) -> grain.MapDataset:
    """Returns rows of images in the entry `inputs`: float32 [height, width, 3].

    Reading a row raises a DataError where the image cannot be decoded.

    Args:
        files: The images.
        processing: Of the model.
    """
    return grain.MapDataset.source(list(files)).map(_Processed(processing))


class _Processed(grain.transforms.Map):
    """Makes the numbers of one image."""

    def __init__(self, processing: ImageProcessing):
        self._processing = processing

    def map(self, element: Path) -> dict[str, np.ndarray]:
        return {"inputs": process_image(element, self._processing)}


def process_image(file: Path, processing: ImageProcessing) -> np.ndarray:
    """Returns the numbers of an image, float32 [height, width, 3].

    Raises:
        DataError: The image cannot be decoded, or is smaller than what is kept of it.
    """
    from PIL import Image

    image = decoded_image(file)
    width, height = image.size
    if processing.shortest_edge is not None:
        edge, shorter = processing.shortest_edge, min(width, height)
        # The longer edge is rounded down, as transformers does it.
        wanted = (edge, int(edge * height / width)) if width == shorter else (int(edge * width / height), edge)
    else:
        tall, wide = processing.size or (height, width)
        wanted = (wide, tall)
    if wanted != image.size:
        image = image.resize(wanted, Image.Resampling(processing.resample))
    if processing.crop is not None:
        tall, wide = processing.crop
        left, top = (image.width - wide) // 2, (image.height - tall) // 2
        if min(left, top) < 0:
            raise DataError(
                f"image {file} has {image.height} x {image.width} pixels after scaling, and the model's files keep "
                f"{tall} x {wide} of them; give a larger image"
            )
        image = image.crop((left, top, left + wide, top + tall))
    pixels = np.asarray(image, np.float32) * np.float32(processing.scale)
    return (pixels - np.array(processing.mean, np.float32)) / np.array(processing.deviation, np.float32)
