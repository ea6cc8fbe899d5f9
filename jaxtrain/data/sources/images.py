"""Images with a class each, in folders or in files of rows; an image is decoded when its row is read."""

import hashlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from jaxtrain.config.data import ImageFolderData, ImageRecordsData
from jaxtrain.data.dataset import Data, example_data
from jaxtrain.data.files import choose_files, few, file_digests, file_size, files_below, require_folder
from jaxtrain.data.formats.arrow import with_names
from jaxtrain.data.formats.open import (
    class_name,
    class_names,
    find_rows,
    named_classes,
    numbered,
    open_rows,
    pass_over_files,
    saved_classes,
    wrong_value,
)
from jaxtrain.data.formats.reader import Cells, Reader, missing_column
from jaxtrain.data.permutation import split_examples
from jaxtrain.errors import DataError, first_line

if TYPE_CHECKING:
    from PIL import Image

# Names, in lower case, of folders that are parts of a dataset and no classes.
_PARTS = ("train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing")
# Usual names of columns.
_IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp", "image.jpg", "image_bytes", "image/encoded")
_LABELS = ("label", "labels", "cls", "class", "fine_label", "image/class/label")

# Mean and deviation of ImageNet's channels, which published ImageNet models use.
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)

# Random crops cover this fraction of the area, at this aspect ratio (Szegedy et al. 2015, arXiv:1409.4842).
_CROP_AREA = (0.08, 1.0)
_CROP_RATIO = (3 / 4, 4 / 3)
_CROP_ATTEMPTS = 10

# Fraction of the shorter side that evaluation keeps: 224 of 256 pixels.
_CENTER = 224 / 256

# The EXIF entry that says how a camera was held, and its values for one held on its side.
_ORIENTATION, _ON_SIDE = 0x0112, (5, 6, 7, 8)

Box = tuple[float, float, float, float]
# Number of an image -> what it is called in messages, and its file or its bytes as a file in memory.
_Encoded = Callable[[int], tuple[str, Any]]


def open_image_folder(config: ImageFolderData, *, seed: int, reading: Mapping[str, Any] | None = None) -> Data:
    """Lists a folder of images; an image is decoded when its row is read.

    Training rows are random crops, half of them flipped, which depend on seed, epoch and row; validation rows are the
    centre of the image. `reading` has the class names of the images that a model was trained on.

    Returns:
        Rows of inputs float32 [image_size, image_size, 3] and targets int32 [].
    """
    root = require_folder(config.path, what="data.path")
    parted = (root / "train").is_dir()
    if parted:
        choose_files(root, sorted(root.glob("[!.]*")), lambda path: path.name in ("train", "val"), what="data.path")
    folder = root / "train" if parted else root
    known = saved_classes(reading, config.kind)
    classes = known or _classes(folder)
    listed = _listed(folder, classes, may_lack=known is not None)
    if parted and (root / "val").is_dir():
        # A validation folder may lack a rare class; a training folder of a class without images is a mistake.
        held_out = _listed(root / "val", classes, may_lack=True)
        sides = np.arange(len(listed)), len(listed) + np.arange(len(held_out))
        listed += held_out
    else:
        sides = split_examples(len(listed), validation_fraction=config.validation_fraction, label=f"data.path {root}")
    digest = hashlib.sha256()
    for path, label in listed:
        # Names and sizes: hashing the pixels of ImageNet would take half an hour at every start.
        digest.update(_bytes(f"{path.relative_to(root).as_posix()}\0{file_size(path)}\0{label}\n"))
    return _image_data(
        config,
        lambda number: (str(listed[number][0]), listed[number][0]),
        np.array([label for _, label in listed], np.int32),
        sides,
        seed=seed,
        identity={"files_sha256": digest.hexdigest()},
        classes=classes,
    )


def open_image_records(config: ImageRecordsData, *, seed: int, reading: Mapping[str, Any] | None = None) -> Data:
    """Opens images in files of rows (tar shards, Parquet, Arrow); rows are those of `open_image_folder`."""
    parts = [find_rows(config.path, what="data.path")]
    if config.validation_path is not None:
        parts.append(find_rows(config.validation_path, what="data.validation_path"))
    files = [file for part in parts for file in part]
    where, there = next(pass_over_files(files, None))
    image = _column(where, there, "image", config.image, _IMAGES)
    label = _column(where, there, "label", config.label, _LABELS)
    if config.image is None and all(file.format == "tar" for file in files):
        # A shard may hold .jpg beside .png; a row of both is read as the first row is.
        image = ";".join(dict.fromkeys([image, *_IMAGES]))
    reader = open_rows(files, [("image", image)])
    own, named = saved_classes(reading, config.kind), named_classes(files[0], label)
    labels = [
        [
            class_name(with_names(row[label], named), where=where, column=label)
            for where, row in pass_over_files(part, [("label", label)])
        ]
        for part in parts
    ]
    together = [name for part in labels for name in part]
    classes = class_names(together, label=config.path, known=own, named=named)
    sides = np.arange(len(labels[0])), np.arange(len(labels[0]), len(together))
    if len(parts) == 1:
        fraction = config.validation_fraction
        sides = split_examples(len(together), validation_fraction=fraction, label=config.path)
    targets = numbered(together, classes)
    return _image_data(
        config,
        lambda number: _encoded(reader, image, number),
        targets,
        sides,
        seed=seed,
        identity={
            "files": file_digests(file.path for file in files),
            "columns": [image, label],
            "targets_sha256": hashlib.sha256(targets.tobytes()).hexdigest(),
        },
        classes=classes,
    )


def _image_data(
    config: ImageFolderData | ImageRecordsData,
    encoded: _Encoded,
    targets: np.ndarray,
    sides: tuple[np.ndarray, np.ndarray],
    *,
    seed: int,
    identity: dict[str, Any],
    classes: list[str],
) -> Data:
    size = config.image_size
    # Any: the rows are numbers of images before, and dicts after.
    train, validation = (grain.MapDataset.source(side) for side in sides)  # pyright: ignore[reportArgumentType]
    read = _Images(encoded, targets, size)
    drawn = int(np.random.SeedSequence(seed % 2**64).generate_state(1)[0])  # of 32 bits, as grain needs it
    return example_data(
        train.random_map(read.augmented, seed=drawn) if config.augment else train.map(read.centered),
        validation.map(read.centered),
        identity={
            "kind": config.kind,
            "classes_sha256": hashlib.sha256(_bytes("\0".join(classes))).hexdigest(),
            **identity,
            "image_size": size,
            "augment": config.augment,
        },
        description=(f"{config.path}: images of {len(classes)} classes ({few(classes)}), {size}x{size} pixels",),
        num_outputs=len(classes),
        input_shape=(size, size, 3),
        reading={"kind": config.kind, "classes": classes},
    )


def image_files(folder: Path, *, classes: Sequence[str] | None = None) -> list[Path]:
    """Returns the files in a folder and the folders below it that Pillow reads, in the order of their paths.

    With `classes` those alone that lie in a folder of one of these names.
    """
    from PIL import Image

    suffixes = {
        suffix
        for suffix, form in Image.registered_extensions().items()
        # Films and data of science are not: Pillow knows that they are there, and cannot decode them.
        if Image.MIME.get(form, "").startswith("image/")
    }

    def is_read(file: Path) -> bool:
        first = file.relative_to(folder).parts[0]
        return file.suffix.lower() in suffixes and (classes is None or first in classes)

    files = choose_files(folder, files_below(folder), is_read, what="the folder")
    if not files:
        raise DataError(f"{folder} holds no image; give a folder with files such as a.jpg or b.png")
    return files


def centered_images(files: Sequence[Path], *, image_size: int) -> grain.MapDataset:
    """Returns rows of images as evaluation reads them, in the entry `inputs`: float32 [image_size, image_size, 3].

    Reading a row raises a DataError where the image cannot be decoded.
    """
    images = _Images(lambda i: (str(files[i]), files[i]), np.zeros(len(files), np.int32), image_size)
    return grain.MapDataset.source(range(len(files))).map(images.centered)


def _bytes(names: str) -> bytes:
    return names.encode("utf-8", errors="surrogateescape")  # names of files need not be UTF-8


def _folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _classes(folder: Path) -> list[str]:
    classes = _folders(folder)
    parts = [name for name in classes if name.lower() in _PARTS]
    if len(classes) < 2 or (len(parts) > 1 and all(_folders(folder / name) for name in parts)):
        shown = few(classes) or "none"
        raise DataError(f"{folder} holds the folders {shown}; give one per class, at least 2 (splits: train/ and val/)")
    return classes


def _listed(folder: Path, classes: Sequence[str], *, may_lack: bool) -> list[tuple[Path, int]]:
    """Returns the images of a folder of class folders, with the number of their class."""
    unknown = next((name for name in _folders(folder) if name not in classes), None)
    if unknown is not None:
        raise DataError(f"{folder / unknown} is a class that training does not have; its classes are {few(classes)}")
    files = image_files(folder, classes=classes)
    names = [file.relative_to(folder).parts[0] for file in files]
    empty = sorted({*classes}.difference(names))
    if empty and not may_lack:
        raise DataError(f"{folder / empty[0]} holds no image; remove the folder, or add images")
    return list(zip(files, numbered(names, classes).tolist(), strict=True))


def _column(where: str, there: Cells, key: str, given: str | None, usual: Sequence[str]) -> str:
    """Returns the column of the image or of the class."""
    name = given or next((one for one in usual if one in there), None)
    # The names of members are lower-case, and one may be any of several: data.image=jpg;png.
    if name is None or not {*there}.intersection(one for each in name.split(";") for one in (each, each.lower())):
        raise missing_column(where, key, name or usual[0], list(there))
    return name


def _encoded(reader: Reader, column: str, number: int) -> tuple[str, Any]:
    """Returns where an image is from, and its bytes as a file."""
    name, value = reader.name_of(number), reader.rows([number])[0][column]
    # `datasets` keeps an image as its bytes and the path that it had.
    value = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(value, bytes):
        raise wrong_value(value, "an encoded image (data.image)", where=name, column=column.partition(";")[0])
    return f"in {name}", io.BytesIO(value)


class _Images:
    """Reads images by number: `encoded` finds one, `targets` are their classes, `size` is the side in pixels."""

    def __init__(self, encoded: _Encoded, targets: np.ndarray, size: int):
        self._encoded, self._targets, self._size = encoded, targets, size

    def centered(self, number: int) -> dict[str, np.ndarray]:
        """Returns the row of an image's centre."""
        return self._row(number, read_part(*self._encoded(int(number)), center_box, size=self._size))

    def augmented(self, number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns the row of a random crop, flipped half of the time."""
        from PIL import Image

        name, content = self._encoded(int(number))
        image = read_part(name, content, lambda width, height: random_box(width, height, rng), size=self._size)
        return self._row(number, image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image)

    def _row(self, number: int, image: "Image.Image") -> dict[str, np.ndarray]:
        return {"inputs": normalized(np.asarray(image)), "targets": np.array(self._targets[number], np.int32)}


def read_part(name: str, content: Any, choose_box: Callable[[int, int], Box], *, size: int) -> "Image.Image":
    """Reads the part of an image that `choose_box(width, height)` names, scaled to a square of `size` pixels a side.

    `content` is its file, or its bytes as a file in memory; a DataError says that `name` cannot be decoded.
    """
    from PIL import Image

    try:
        with Image.open(content) as image:
            # Pillow itself turns TIFF files, and says their size as it will be.
            is_on_side = image.format != "TIFF" and image.getexif().get(_ORIENTATION, 1) in _ON_SIDE
            width, height = image.size[::-1] if is_on_side else image.size
            left, top, right, bottom = choose_box(width, height)
            # A JPEG can be decoded at a half, a quarter or an eighth of its size, never below the size of the result.
            shrink = max(min(right - left, bottom - top) / size, 1.0)
            image.draft("RGB", (math.ceil(image.width / shrink), math.ceil(image.height / shrink)))
            pixels = _upright(image)
        x, y = pixels.width / width, pixels.height / height
        box = left * x, top * y, min(right * x, pixels.width), min(bottom * y, pixels.height)
        return pixels.resize((size, size), Image.Resampling.BILINEAR, box=box)
    except Exception as error:  # Pillow's readers raise a dozen types of errors for a damaged file.
        reason = first_line(error).replace(name, "the file")
        raise DataError(f"image {name} cannot be decoded ({reason}); repair or remove it") from None


def _upright(image: "Image.Image") -> "Image.Image":
    """Decodes an image in RGB, turned as viewers show it, 8 bits per channel."""
    from PIL import Image, ImageOps

    form = image.format  # transposing forgets it
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16") or (image.mode == "I" and form in ("PNG", "PPM")):
        # Converted without the shift, all but the darkest 1/256 of the scale would be white.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("32 bits per pixel do not say which value is white: convert it to 8 or 16 bits")
    return image.convert("RGB")


def normalized(pixels: np.ndarray) -> np.ndarray:
    """Returns the pixels of images, uint8 [..., W, 3], normalised by mean and deviation of each channel: float32."""
    # Over rows of pixels, because NumPy's loops over three channels take seven times as long.
    width = pixels.shape[-2]
    flat = pixels.reshape(*pixels.shape[:-2], -1)
    inputs = np.multiply(flat, np.tile(1 / (255 * _DEVIATION), width), dtype=np.float32)
    inputs -= np.tile(_MEAN / _DEVIATION, width)
    return inputs.reshape(pixels.shape)


def center_box(width: int, height: int) -> Box:
    """Returns the square in the middle of an image that evaluation reads."""
    side = min(width, height) * _CENTER
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """Returns a random part of an image that training reads."""
    for _ in range(_CROP_ATTEMPTS):
        area = width * height * rng.uniform(*_CROP_AREA)
        ratio = math.exp(rng.uniform(math.log(_CROP_RATIO[0]), math.log(_CROP_RATIO[1])))
        crop_width, crop_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if crop_width <= width and crop_height <= height:
            left, top = rng.uniform(0, width - crop_width), rng.uniform(0, height - crop_height)
            return left, top, left + crop_width, top + crop_height
    # Very long images rarely have a crop of these ratios.
    return center_box(width, height)
