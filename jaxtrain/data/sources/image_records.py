"""Images with classes in tar shards and in columns of other files; an image is decoded when its row is read."""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from jaxtrain.config.data import ImageRecordsData
from jaxtrain.data.formats.arrow import with_names
from jaxtrain.data.formats.opened import DataFile, find_rows, named_classes, open_file, open_rows, pass_over_file
from jaxtrain.data.formats.reader import Cells, Reader, good_value, missing_column
from jaxtrain.data.permutation import split_examples
from jaxtrain.data.rows import Examples, grain_seed, matching_reading
from jaxtrain.data.skipped import BadRecordError, SkippedRecords, skipped_records
from jaxtrain.data.sources.images import Box, center_box, few, flipped, image_row, random_box, read_part
from jaxtrain.data.text.records import class_name, class_names, numbered, saved_classes
from jaxtrain.errors import DataError

_IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp", "image.jpg", "image_bytes", "image/encoded")
_LABELS = ("label", "labels", "cls", "class", "fine_label", "image/class/label")


def open_image_records(config: ImageRecordsData, *, seed: int, reading: Mapping[str, Any] | None = None) -> Examples:
    """Opens images in files of rows.

    Training rows are random crops, half of them flipped, which depend on seed, epoch and row; validation rows are the
    centre of the image.

    Args:
        config: Which files.
        seed: Decides the augmentation.
        reading: Class names of the images that a model was trained on; None: those of the data.

    Returns:
        Rows of inputs float32 [image_size, image_size, 3] and targets int32 [].

    Raises:
        DataError: There are no images, fewer than two classes, or a file is damaged or lacks a column. Reading a row
            raises it where the image cannot be decoded and is not to be skipped.
    """
    parts = [find_rows(config.path, what="data.path")]
    if config.validation_path is not None:
        parts.append(find_rows(config.validation_path, what="data.validation_path"))
    files = [file for part in parts for file in part]
    # The first file with rows: writers in parallel leave empty ones.
    first_rows = next((found for file in files if len(found := open_file(file, None))), None)
    if first_rows is None:
        raise DataError(f"{config.path} has no rows; give a file with images")
    image, label = _columns(config, first_rows)
    read = image
    if config.image is None and all(file.format == "tar" for file in files):
        # A shard may hold .jpg beside .png; a row of both is read as the first row is.
        read = ";".join(dict.fromkeys([image, *_IMAGES]))
    reader = open_rows(files, [("image", read)], label=config.path)
    found = _labels(files, label)
    own = saved_classes(matching_reading(reading, kind=config.kind), config.kind)
    named = named_classes(files[0], label)
    classes = class_names(found, label=config.path, known=own, named=named)
    if own is None and len(classes) < 2:
        raise DataError(f"{config.path} has images of one class ('{classes[0]}'); set data.label to another column")
    targets = numbered(found, classes)
    if len(parts) > 1:
        first = sum(len(open_file(file, [("label", label)])) for file in parts[0])
        train, validation = np.arange(first), np.arange(first, len(targets))
    else:
        train, validation = split_examples(
            len(targets), validation_fraction=config.validation_fraction, label=config.path
        )
    skipped = skipped_records(config.path, on_bad_record=config.on_bad_record, max_bad_fraction=config.max_bad_fraction)
    readers = [_Images(reader, read, targets, side, config.image_size, skipped) for side in (train, validation)]
    numbers = [grain.MapDataset.source(range(len(side))) for side in (train, validation)]
    train_rows = (
        numbers[0].random_map(_Augmented(readers[0]), seed=grain_seed(seed))
        if config.augment
        else numbers[0].map(_Centered(readers[0]))
    )
    size = config.image_size
    return Examples(
        train=train_rows,
        validation=numbers[1].map(_Centered(readers[1])) if len(validation) else None,
        num_outputs=len(classes),
        input_shape=(size, size, 3),
        identity={
            "kind": config.kind,
            "files": [file.identity for file in files],
            "columns": [image, label],
            "classes_sha256": hashlib.sha256("\0".join(classes).encode()).hexdigest(),
            "targets_sha256": hashlib.sha256(targets.tobytes()).hexdigest(),
            "image_size": size,
            "augment": config.augment,
        },
        description=(f"{config.path}: images of {len(classes)} classes ({few(classes)}), {size}x{size} pixels",),
        reading={"kind": config.kind, "classes": classes},
        skipped=skipped,
    )


def _columns(config: ImageRecordsData, reader: Reader) -> tuple[str, str]:
    """Returns the columns of the image and of the class."""
    there = list(reader.rows([0])[0])
    chosen = []
    for key, given, usual in (("image", config.image, _IMAGES), ("label", config.label, _LABELS)):
        name = given or next((one for one in usual if one in there), None)
        if name is None:
            raise missing_column(reader.name_of(0), key, usual[0], there)
        # The names of members are lower-case, and one may be any of several: data.image=jpg;png.
        if not {*there}.intersection(one for each in name.split(";") for one in (each, each.lower())):
            raise missing_column(reader.name_of(0), key, name, there)
        chosen.append(name)
    return chosen[0], chosen[1]


def _labels(files: Sequence[DataFile], column: str) -> list[str]:
    """Returns the class of each image: a pass over the column of the classes alone."""
    found = []
    for file in files:
        names = named_classes(file, column)
        for where, row in pass_over_file(file, [("label", column)]):
            value = row[column] if names is None else with_names(row[column], names)
            found.append(class_name(value, where=where, column=column))
    return found


class _Images:
    """Reads the images of one side of the split."""

    def __init__(
        self,
        reader: Reader,
        column: str,
        targets: np.ndarray,
        numbers: np.ndarray,
        size: int,
        skipped: SkippedRecords | None,
    ):
        self._reader, self._column, self._targets, self._numbers = reader, column, targets, numbers
        self._size, self._skipped = size, skipped

    def name_of(self, place: int) -> str:
        return self._reader.name_of(int(self._numbers[place]))

    def read(self, place: int, choose_box: Callable[[int, int], Box]) -> tuple[Any, int]:
        """Returns the part of an image that `choose_box(width, height)` returns, and its class."""

        def one(at: int) -> tuple[Any, int]:
            number = int(self._numbers[at])
            content = _encoded(self._reader.rows([number])[0], self._column, where=self.name_of(at))
            image = read_part(f"in {self.name_of(at)}", choose_box, size=self._size, content=content)
            return image, int(self._targets[number])

        return good_value(one, int(place), num_rows=len(self._numbers), skipped=self._skipped, label=self._reader.label)


def _encoded(row: Cells, column: str, *, where: str) -> bytes:
    value = row[column]
    # `datasets` keeps an image as its bytes and the path that it had.
    if isinstance(value, dict):
        value = value.get("bytes")
    if not isinstance(value, bytes):
        raise BadRecordError(
            f"{where} column '{column.partition(';')[0]}' holds a value of type {type(value).__name__}, not an encoded "
            "image; set data.image, or save the images themselves and not their paths"
        )
    return value


class _Centered(grain.transforms.Map):
    """Takes the centre of the image, scaled to a square."""

    def __init__(self, images: _Images):
        self._images = images

    def map(self, element: Any) -> dict[str, np.ndarray]:
        return image_row(*self._images.read(element, center_box))


class _Augmented(grain.transforms.RandomMap):
    """Takes a random crop, scaled to a square and flipped half of the time."""

    def __init__(self, images: _Images):
        self._images = images

    def random_map(self, element: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        image, label = self._images.read(element, functools.partial(random_box, rng=rng))
        return image_row(flipped(image) if rng.random() < 0.5 else image, label)
