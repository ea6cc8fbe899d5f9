"""Image files in one folder per class; an image is decoded when its row is read."""

import functools
import hashlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grain
import numpy as np

from jaxtrain.config.data import ImageFolderData
from jaxtrain.data.files import FileState, file_state, files_below, require_folder
from jaxtrain.data.permutation import split_examples
from jaxtrain.data.rows import Examples, grain_seed, matching_reading
from jaxtrain.data.skipped import BadRecordError, SkippedRecords, skipped_records
from jaxtrain.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_TRAIN, _VALIDATION = "train", "val"
# Names, in lower case, of folders that are parts of a dataset and no classes, where they hold folders of images.
_PARTS = ("train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing")

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

# A file of kilobytes can claim gigapixels; ImageNet's largest image has 43 million.
_MAX_PIXELS = 2**28

Box = tuple[float, float, float, float]


class _Image(NamedTuple):
    """An image of a listing; the path comes first, which names a row."""

    path: Path
    label: int
    # Number among the images of its part, from 0.
    place: int
    state: FileState


def open_image_folder(config: ImageFolderData, *, seed: int, reading: Mapping[str, Any] | None = None) -> Examples:
    """Lists a folder of images.

    Training rows are random crops, half of them flipped, which depend on seed, epoch and row; validation rows are the
    centre of the image.

    Args:
        config: Which folder.
        seed: Decides the augmentation.
        reading: Class names of the images that a model was trained on, of which some may be missing here; None: the
            names of the folders.

    Returns:
        Rows of inputs float32 [image_size, image_size, 3] and targets int32 [].

    Raises:
        DataError: There are no images, or fewer than two classes. Reading a row raises it where the image cannot be
            decoded and is not to be skipped, too many were skipped, or the file changed since.
    """
    root = require_folder(config.path, what="data.path")
    reading = matching_reading(reading, kind="image_folder")
    parted = (root / _TRAIN).is_dir()
    folder = root / _TRAIN if parted else root
    classes = _classes(folder) if reading is None else list(reading["classes"])
    owner = f"{_TRAIN}/" if reading is None else "the run"
    train = _list(folder, classes, owner=owner, may_lack=reading is not None)
    validation = None
    if parted and (root / _VALIDATION).is_dir():
        # A validation folder may lack a rare class; a training folder of a class without images is a mistake.
        validation = _list(root / _VALIDATION, classes, owner=owner, may_lack=True)
    listed = train + (validation or [])
    if validation is None:
        kept, held_out = split_examples(
            len(train), validation_fraction=config.validation_fraction, label=f"data.path {root}"
        )
        train, validation = [train[i] for i in kept], [train[i] for i in held_out]
    skipped = skipped_records(str(root), on_bad_record=config.on_bad_record, max_bad_fraction=config.max_bad_fraction)
    images = [_placed(part) for part in (train, validation)]
    readers = [_Reader(part, config.image_size, skipped, num_images=len(listed)) for part in images]
    size = config.image_size
    # Without augmentation, training reads images as evaluation does.
    train_rows = (
        grain.MapDataset.source(images[0]).random_map(_Augmented(readers[0]), seed=grain_seed(seed))
        if config.augment
        else grain.MapDataset.source(images[0]).map(_Centered(readers[0]))
    )
    return Examples(
        train=train_rows,
        validation=grain.MapDataset.source(images[1]).map(_Centered(readers[1])) if validation else None,
        num_outputs=len(classes),
        input_shape=(size, size, 3),
        identity={
            "kind": "image_folder",
            "classes_sha256": hashlib.sha256(_bytes_of("\0".join(classes))).hexdigest(),
            # Names and sizes: hashing the pixels of ImageNet would take half an hour at every start.
            "files_sha256": _listing_sha256(listed, root=root),
            "image_size": size,
            "augment": config.augment,
        },
        description=(
            f"{root}: images of {len(classes)} classes, {size}x{size} pixels",
            *(_others(root) if parted else ()),
        ),
        reading={"kind": "image_folder", "classes": classes},
        skipped=skipped,
    )


def image_files(folder: Path) -> list[Path]:
    """Returns the image files in a folder and the folders below it, in the order of their paths.

    Raises:
        DataError: There is none.
    """
    files = _files_below(folder)
    if not files:
        raise DataError(f"{folder} holds no image; give a folder with files ({' '.join(sorted(_SUFFIXES))})")
    return files


def is_image_file(file: Path) -> bool:
    """Returns whether the name of a file ends as that of an image."""
    return file.suffix.lower() in _SUFFIXES


def centered_images(files: Sequence[Path], *, image_size: int) -> grain.MapDataset:
    """Returns rows of images as evaluation reads them, in the entry `inputs`: float32 [image_size, image_size, 3].

    Reading a row raises a DataError where the image cannot be decoded.
    """
    images = _placed([(file_state(file), 0) for file in files])
    return grain.MapDataset.source(images).map(_Centered(_Reader(images, image_size, None, num_images=len(images))))


def _classes(folder: Path) -> list[str]:
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(classes) < 2:
        raise DataError(
            f"{folder} holds {len(classes)} class folders; give a folder with one folder per class, at least 2"
        )
    parts = [name for name in classes if name.lower() in _PARTS]
    if len(parts) > 1 and not any(is_image_file(path) for name in parts for path in (folder / name).iterdir()):
        raise DataError(
            f"{folder} holds {' and '.join(parts)}, which are named as parts of a dataset and not as classes; name "
            f"them {_TRAIN}/ and {_VALIDATION}/, or give one of them as data.path"
        )
    return classes


def _others(root: Path) -> list[str]:
    """Returns the folders beside train/ that are not read, as a line of the description where there are any."""
    others = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    others = [f"{name}/" for name in others if name not in (_TRAIN, _VALIDATION)]
    if not others:
        return []
    held_out = f"{_VALIDATION}/, or else some of {_TRAIN}/"
    return [f"not read: {few(others)} beside {_TRAIN}/ (held-out images are those of {held_out})"]


def _files_below(folder: Path) -> list[Path]:
    """Returns the image files in a folder and below it.

    Raises:
        DataError: A link leads to nothing: the data would be smaller than it looks, without a word.
    """
    for path in folder.rglob("*"):
        if is_image_file(path) and path.is_symlink() and not path.exists() and not path.name.startswith("."):
            raise DataError(f"image {path} is a link to nothing; restore the file that it leads to, or remove it")
    return [path for path in files_below(folder) if is_image_file(path)]


def _placed(listed: Sequence[tuple[FileState, int]]) -> list[_Image]:
    return [_Image(state.path, label, place, state) for place, (state, label) in enumerate(listed)]


def _bytes_of(text: str) -> bytes:
    """Returns the bytes of a text with names of files, which need not be UTF-8."""
    return text.encode("utf-8", errors="surrogateescape")


def _list(folder: Path, classes: Sequence[str], *, owner: str, may_lack: bool) -> list[tuple[FileState, int]]:
    unknown = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name not in classes)
    unknown = [name for name in unknown if not name.startswith(".")]
    if unknown:
        raise DataError(f"{folder / unknown[0]} is a class that {owner} does not have; its classes are {few(classes)}")
    listed: list[tuple[FileState, int]] = []
    for label, name in enumerate(classes):
        if (folder / name).is_symlink() and folder.resolve().is_relative_to((folder / name).resolve()):
            raise DataError(f"{folder / name} links to a folder that it lies in; remove the link")
        files = _files_below(folder / name)
        if not files and not may_lack:
            raise DataError(f"{folder / name} holds no image; add files ({' '.join(sorted(_SUFFIXES))}) or remove it")
        listed += [(file_state(file), label) for file in files]
    if not listed:
        raise DataError(f"{folder} holds no image; add files ({' '.join(sorted(_SUFFIXES))}) or remove it")
    return listed


def few(names: Sequence[str]) -> str:
    """Returns the first names of a list, as text."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _listing_sha256(listed: Sequence[tuple[FileState, int]], *, root: Path) -> str:
    digest = hashlib.sha256()
    for state, label in listed:
        digest.update(_bytes_of(f"{state.path.relative_to(root).as_posix()}\0{state.num_bytes}\0{label}\n"))
    return digest.hexdigest()


class _Reader:
    """Reads images of a part, scaled to a square; the next good one takes the place of a bad one that is skipped.

    Which one that is follows from the files alone, so every process finds the same without asking another.
    """

    def __init__(self, images: Sequence[_Image], size: int, skipped: SkippedRecords | None, *, num_images: int):
        self._images, self._size, self._skipped, self._num_images = images, size, skipped, num_images

    def read(self, image: _Image, choose_box: Callable[[int, int], Box]) -> tuple["Image.Image", int]:
        """Returns the part of an image that `choose_box(width, height)` returns, and the label of the image."""
        for offset in range(len(self._images)):
            found = self._images[(image.place + offset) % len(self._images)]
            found.state.check()
            try:
                return read_part(found.path, choose_box, size=self._size), found.label
            except BadRecordError as error:
                if self._skipped is None:
                    raise
                self._skipped.add(error, of=self._num_images)
        raise DataError(f"no image beside {image.path} can be decoded; repair them")


class _Centered(grain.transforms.Map):
    """Takes the centre of the image, scaled to a square."""

    def __init__(self, reader: _Reader):
        self._reader = reader

    def map(self, element: _Image) -> dict[str, np.ndarray]:
        return image_row(*self._reader.read(element, center_box))


class _Augmented(grain.transforms.RandomMap):
    """Takes a random crop, scaled to a square and flipped half of the time."""

    def __init__(self, reader: _Reader):
        self._reader = reader

    def random_map(self, element: _Image, rng: np.random.Generator) -> dict[str, np.ndarray]:
        image, label = self._reader.read(element, functools.partial(random_box, rng=rng))
        return image_row(flipped(image) if rng.random() < 0.5 else image, label)


def read_part(
    path: Path | str, choose_box: Callable[[int, int], Box], *, size: int, content: bytes | None = None
) -> "Image.Image":
    """Reads a part of an image, scaled to a square.

    Args:
        path: The file, or what an image in `content` is called in messages.
        choose_box: (width, height) -> the part to read.
        size: Side of the square.
        content: The encoded image; None: that of the file.

    Raises:
        DataError: It cannot be decoded: a BadRecordError where its content is at fault.
    """
    from PIL import Image

    try:
        with Image.open(path if content is None else io.BytesIO(content)) as image:
            _check_pixels(image, path)
            # Pillow itself turns TIFF files, and says their size as it will be.
            is_on_side = image.format != "TIFF" and _orientation(image) in _ON_SIDE
            width, height = image.size[::-1] if is_on_side else image.size
            left, top, right, bottom = choose_box(width, height)
            # A JPEG can be decoded at a half, a quarter or an eighth of its size, never below the size of the result.
            shrink = max(min(right - left, bottom - top) / size, 1.0)
            image.draft("RGB", (math.ceil(image.width / shrink), math.ceil(image.height / shrink)))
            pixels = _upright(image, path)
        x, y = pixels.width / width, pixels.height / height
        box = left * x, top * y, min(right * x, pixels.width), min(bottom * y, pixels.height)
        return pixels.resize((size, size), Image.Resampling.BILINEAR, box=box)
    except Exception as error:  # Pillow's readers raise a dozen types of errors for a damaged file.
        raise _undecodable(path, error) from None


def decoded_image(path: Path) -> "Image.Image":
    """Reads a whole image in RGB, 8 bits per channel.

    Raises:
        DataError: It cannot be decoded.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            _check_pixels(image, path)
            return _upright(image, path)
    except Exception as error:  # as in read_part
        raise _undecodable(path, error) from None


def _check_pixels(image: "Image.Image", path: Path | str) -> None:
    """Raises a BadRecordError where the header claims more pixels than are decoded; nothing is allocated yet."""
    if image.width * image.height > _MAX_PIXELS:
        raise BadRecordError(
            f"image {path} has {image.width:,} x {image.height:,} pixels, above {_MAX_PIXELS:,}; scale it down, or "
            "remove it"
        )


def _undecodable(path: Path | str, error: Exception) -> DataError:
    """Returns the error for an image: a BadRecordError only where its content is at fault, in every process alike."""
    if isinstance(error, DataError):
        return error
    if isinstance(error, MemoryError):
        return DataError(f"image {path} needs more memory than there is; scale it down, or set train.workers lower")
    if isinstance(error, OSError) and error.errno is not None:
        return DataError(f"image {path} cannot be read ({error.strerror}); check the disk, repair or remove it")
    reason = str(error).replace(str(path), "the file").splitlines()[0] if str(error) else type(error).__name__
    return BadRecordError(f"image {path} cannot be decoded ({reason}); repair or remove it")


def _orientation(image: "Image.Image") -> int:
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:  # what the file says of itself is damaged, and its pixels may not be
        return 1


def _upright(image: "Image.Image", path: Path | str) -> "Image.Image":
    """Decodes an image in RGB, turned as viewers show it, 8 bits per channel.

    Raises:
        BadRecordError: The pixels have 32 bits, whose scale the file does not contain.
    """
    from PIL import Image, ImageOps

    if _orientation(image) != 1:
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16"):
        # Converted without the shift, all but the darkest 1/256 of the scale would be white.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise BadRecordError(
            f"image {path} has pixels of 32 bits, whose range is not known; store it with 8 or 16 bits"
        )
    return image.convert("RGB")


def flipped(image: "Image.Image") -> "Image.Image":
    """Returns an image mirrored left to right."""
    from PIL import Image

    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def image_row(image: "Image.Image", label: int) -> dict[str, np.ndarray]:
    """Returns a row with the image's pixels, normalised by mean and deviation of each channel."""
    return {"inputs": normalized(np.asarray(image)), "targets": np.array(label, np.int32)}


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
