"""The rows of a file as a run's model takes them, read as the run read its own: columns, scales, tokens, images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.arguments import local_path
from jaxtrain.config.base import Group
from jaxtrain.config.data import ImageFolderData, ImageRecordsData, LabelledTextData, TaggedTextData
from jaxtrain.data.archives import check_archive
from jaxtrain.data.files import decode_utf8, require_file
from jaxtrain.data.sources.images import centered_images, image_files, is_image_file
from jaxtrain.data.sources.published_images import published_images
from jaxtrain.data.sources.table_rows import read_input_columns
from jaxtrain.data.text.framed import FramedTokens, framed_tokens, framed_words, text_rows, word_rows
from jaxtrain.data.text.records import list_of, read_records, text_of
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.published.image_processor import PROCESSOR_FILE, ImageProcessing

_ARRAYS = (".npy", ".npz")
_WHAT = "the file"


@dataclass(frozen=True)
class RowReader:
    """How a model reads rows.

    Attributes:
        name: Of the run or of the published model, in messages.
        model: The model group of its config; None: the model came from Python.
        tokenizer: Makes its tokens; None: it has none.
        data: The data group of a run; None: the model is no run's, or the data came from Python.
        task: Of the run's config; None: it came from Python, or the model is no run's.
        trained_on: The entry `data` of a run's `run.json`.
        classes: Names of the classes; None: nothing names them.
        images: How a published model wants its images; None: its files do not say it, or it is a run.
    """

    name: str
    model: Group | None
    tokenizer: Tokenizer | None
    data: Group | None = None
    task: Any = None
    trained_on: Mapping[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    images: ImageProcessing | None = None


@dataclass(frozen=True)
class FileRows:
    """Rows without targets.

    Attributes:
        inputs: What `OpenedRun.predict` takes.
        files: Of images, the file of each row; None: the rows are those of one file.
        words: Of words, those of each row.
        places: Of words, the place of the first token of each in its row; None: the row was truncated before it.
    """

    inputs: Any
    files: tuple[str, ...] | None = None
    words: list[list[str]] | None = None
    places: list[list[int | None]] | None = None


def read_rows(reader: RowReader, path: str | Path, *, head: str | None) -> FileRows:
    """Reads the rows of a file for a model.

    Args:
        reader: How the model reads rows.
        path: A table (.csv, .jsonl, .parquet), images (a folder, a file, a .txt with a path per line), texts (a table,
            or a .txt with a text per line) or arrays (.npy; .npz with the array `inputs`).
        head: Kind of the head of a transformer; None: the model is another one.

    Raises:
        ConfigError: There is no tokenizer, or the model's rows do not come in files.
        DataError: The file or a row of it is not what the run reads.
    """
    path = local_path(path, what=_WHAT, error=DataError).expanduser()
    data, reading, shape = reader.data, reader.trained_on.get("reading") or {}, reader.trained_on.get("input_shape")
    if path.suffix in _ARRAYS:
        return FileRows(_read_arrays(path))
    if reading.get("kind") == "table":
        columns = read_input_columns(
            str(path),
            reading.get("columns"),
            num_columns=(shape or [0])[0],
            target=getattr(data, "target", None),
        )
        return FileRows(columns)
    if isinstance(data, ImageFolderData | ImageRecordsData):
        files = _image_paths(path)
        return FileRows(centered_images(files, image_size=data.image_size), files=tuple(map(str, files)))
    if reader.images is not None:
        files = _image_paths(path)
        return FileRows(published_images(files, reader.images), files=tuple(map(str, files)))
    if reader.task == "reward":
        # A text alone has neither the roles nor the end of an answer, and its score would mean nothing.
        raise ConfigError(
            f"{reader.name} scores chats, not the rows of a file such as {path}; jaxtrain.open_run(...).predict("
            "{'tokens': tokens, 'segments': segments}) gives the scores of chats that the template has written"
        )
    if head in ("token", "sequence", "regression", "embedding"):
        return _read_texts(reader, path, of_words=head == "token")
    if not reader.trained_on and reader.task == "classification" and (path.is_dir() or is_image_file(path)):
        raise ConfigError(
            f"{reader.name} has no {PROCESSOR_FILE}, so that nothing says how an image becomes numbers; fetch it with "
            "the model, or give a .npy file of an array"
        )
    if not path.exists():
        require_file(path, what=_WHAT)  # which says so
    raise ConfigError(
        f"{reader.name} does not say how its rows are made of a file such as {path}; give a .npy file of an array "
        f"[rows, {', '.join(map(str, shape or ['...']))}] as the model takes it"
    )


def _read_arrays(path: Path) -> np.ndarray:
    file = require_file(path, what=_WHAT)
    check_archive(file)
    try:
        found = np.load(file, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # zipfile, zlib and NumPy raise a dozen types of errors for a damaged file.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{file} holds no array ({reason}); write it with numpy.save") from None
    if "inputs" not in arrays:
        there = ", ".join(arrays) or "none"
        raise DataError(f"{file} has no array 'inputs' (it has: {there}); save it by that name")
    return arrays["inputs"]


def _image_paths(path: Path) -> list[Path]:
    """The images of a folder, of a list of paths, or the one that is named."""
    if path.is_dir():
        return image_files(path)
    file = require_file(path, what=_WHAT)
    if is_image_file(file):
        return [file]
    if file.suffix != ".txt":
        raise DataError(
            f"{file} is no image; give a folder of images, an image, or a .txt file with the path of an image per line"
        )
    found = []
    for number, line in enumerate(_lines(file), start=1):
        # A list names its images as seen from where it is.
        image = file.parent / Path(line.strip()).expanduser()
        if not line.strip() or not image.is_file():
            named = f"names {line.strip()}, which is no file" if line.strip() else "is empty"
            raise DataError(f"{file}:{number} {named}; write the path of an image, from the folder of the list on")
        found.append(image)
    return found


def _read_texts(reader: RowReader, path: Path, *, of_words: bool) -> FileRows:
    data = reader.data
    if reader.tokenizer is None:
        raise ConfigError(
            f"{reader.name} has no tokenizer.json, so it cannot read texts; give a .npy file of an array of tokens"
        )
    shape = reader.trained_on.get("input_shape")
    length = shape[-1] if shape else getattr(reader.model, "max_sequence_length", 0)
    tokens = framed_tokens(reader.tokenizer, getattr(data, "tokenizer", None))
    if of_words:
        column = data.words if isinstance(data, TaggedTextData) else "words"
        return _words(path, tokens, column, length, fit=not shape)
    columns = ["text"]
    if isinstance(data, LabelledTextData):
        columns = [data.text, *([data.second_text] if data.second_text else [])]
    texts = _texts(path, columns)
    # The rows of a run are as long as in training; those of a published model, as long as the longest text needs.
    return FileRows(text_rows(tokens, texts, sequence_length=length, fit=not shape))


def _texts(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """The texts of each row."""
    if path.suffix == ".txt":
        if len(columns) > 1:
            raise DataError(
                f"{path} has one text per line, and the run reads two; give a .csv, .jsonl or .parquet file with the "
                f"columns {' and '.join(columns)}"
            )
        return [[line] for line in _lines(require_file(path, what=_WHAT))]
    records = read_records(str(path), [(None, name) for name in columns], what=_WHAT)
    return [
        [text_of(value, where=record.where, column=name) for name, value in zip(columns, record.values, strict=True)]
        for record in records
    ]


def _words(path: Path, tokens: FramedTokens, column: str, length: int, *, fit: bool) -> FileRows:
    if path.suffix == ".txt":
        words = [line.split() for line in _lines(require_file(path, what=_WHAT))]
    else:
        records = read_records(str(path), [(None, column)], what=_WHAT)
        listed = [list_of(record.values[0], where=record.where, column=column) for record in records]
        words = [[str(word) for word in row] for row in listed]
    found = framed_words(tokens, words, sequence_length=length)
    rows = word_rows(tokens, found, sequence_length=length, fit=fit)
    return FileRows(rows, words=words, places=found.places)


def _lines(file: Path) -> list[str]:
    """The lines of a text file without their ends; a file of one line end has one empty line."""
    text = decode_utf8(file.read_bytes(), path=file).removeprefix("\ufeff")
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")
