"""Images: what decoding and augmentation give, and that threads change nothing."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain.config.data import ImageFolderData
from jaxtrain.data import Batches, open_data, prefetch
from jaxtrain.data.sources.images import _CROP_AREA, _CROP_RATIO

PIL = pytest.importorskip("PIL.Image")
SIDE, SIZE, COUNT = 256, 32, 12
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def write(folder: Path, pixels: list[np.ndarray], suffix: str = "png") -> ImageFolderData:
    """A folder of two classes, and its config with all images in training but the last."""
    for number, image in enumerate(pixels):
        path = folder / str(number % 2) / f"{number:02}.{suffix}"
        path.parent.mkdir(exist_ok=True, parents=True)
        PIL.fromarray(image).save(path)
    return ImageFolderData(path=str(folder), image_size=SIZE, validation_fraction=0.1)


def coordinates() -> np.ndarray:
    """An image whose red is the column and whose green is the row."""
    column = np.arange(SIDE, dtype=np.uint8)
    return np.stack(
        [np.tile(column, (SIDE, 1)), np.tile(column[:, None], (1, SIDE)), np.full((SIDE, SIDE), 7)], -1
    ).astype(np.uint8)


def pixels_of(inputs: np.ndarray) -> np.ndarray:
    return (inputs.astype(np.float64) * DEVIATION + MEAN) * 255


def test_crops_and_flips_are_drawn_as_published(tmp_path: Path) -> None:
    rows: Any = open_data(write(tmp_path, [coordinates()] * COUNT), sequence_length=None, seed=0).train
    boxes = []
    for index in range(100):
        pixels = pixels_of(rows[index]["inputs"])
        np.testing.assert_allclose(pixels[..., 2], 7, atol=1e-4)  # the normalisation, undone: float32 of up to 255
        red, green = pixels[SIZE // 2, :, 0], pixels[:, SIZE // 2, 1]
        # From the middle of the first pixel to that of the last.
        boxes.append([(red[-1] - red[0]) * SIZE / (SIZE - 1), (green[-1] - green[0]) * SIZE / (SIZE - 1)])
    width, height = np.abs(boxes).T
    flipped = np.array(boxes)[:, 0] < 0
    assert np.all(np.array(boxes)[:, 1] > 0), "upside down"
    assert 30 < flipped.sum() < 70  # of 100 throws of a coin: four deviations
    share, ratio = width * height / SIDE**2, width / height
    # A pixel of 256 is rounded to 8 bits: a box is known to within 2 of its pixels, the smallest has 60.
    assert _CROP_AREA[0] * 0.93 < share.min() < 0.2
    assert 0.8 < share.max() < _CROP_AREA[1] * 1.07
    assert _CROP_RATIO[0] * 0.95 < ratio.min() < 0.9
    assert 1.1 < ratio.max() < _CROP_RATIO[1] * 1.05


def test_a_jpeg_decoded_at_a_fraction_shows_the_same(tmp_path: Path) -> None:
    """Evaluation of a large JPEG, which is decoded at a fraction, against the same pixels as PNG, which is not."""
    small = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    smooth = np.asarray(PIL.fromarray(small).resize((900, 600), PIL.Resampling.BICUBIC))
    found = {}
    for suffix in ("png", "jpg"):
        config = write(tmp_path / suffix, [smooth] * 4, suffix)
        validation: Any = open_data(config, sequence_length=None, seed=0).validation
        found[suffix] = validation[0]["inputs"]
    # The loss of JPEG on smooth colours and half a pixel between two ways to shrink: 1 % of the range on average.
    assert np.abs(pixels_of(found["jpg"]) - pixels_of(found["png"])).mean() < 2.55
    assert not np.array_equal(found["jpg"], found["png"])


def test_workers_and_prefetching_change_nothing(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    images = [random.integers(0, 256, (40 + number, 48, 3), np.uint8) for number in range(COUNT)]
    rows = open_data(write(tmp_path, images), sequence_length=None, seed=0).train
    runs = []
    for workers, depth in ((1, 0), (3, 2)):
        batches = Batches(rows, 4, seed=5, shuffle=True, workers=workers)
        place = dict.fromkeys(batches.spec(), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        loaded = prefetch(lambda k, load=batches.load, place=place: load(k, place), 0, 6, depth=depth)
        runs.append([jax.device_get(batch) for batch in loaded])  # two epochs
        late = jax.device_get(batches.load(4, place))
        np.testing.assert_array_equal(late["inputs"], runs[-1][4]["inputs"])  # whatever was read before
    for run in runs[1:]:
        for batch, wanted in zip(run, runs[0], strict=True):
            assert batch.keys() == wanted.keys()
            for name in batch:
                np.testing.assert_array_equal(batch[name], wanted[name])
