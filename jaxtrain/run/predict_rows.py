"""The rows of a file as a run's model takes them, read as the run read its own: columns, scales, tokens, images."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.config.data import ImageFolderData, LabelledTextData, TaggedTextData
from jaxtrain.config.local_path import local_path
from jaxtrain.data.files import decode_utf8, require_file
from jaxtrain.data.sources.images import centered_images, image_files, is_image_file
from jaxtrain.data.sources.table_rows import read_input_columns
from jaxtrain.data.text.framed import FramedTokens, framed_tokens, framed_words, text_rows, word_rows
from jaxtrain.data.text.records import list_of, read_records, text_of
from jaxtrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from jaxtrain.run.opened import OpenedRun

_ARRAYS = (".npy", ".npz")
_WHAT = "the file"


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


def read_rows(run: "OpenedRun", path: str | Path, *, head: str | None) -> FileRows:
    """Reads the rows of a file for a run's model.

    Args:
        run: Whose reading is used.
        path: A table (.csv, .jsonl, .parquet), images (a folder, a file, a .txt with a path per line), texts (a table,
            or a .txt with a text per line) or arrays (.npy; .npz with the array `inputs`).
        head: Kind of the head of a transformer; None: the model is another one.

    Raises:
        ConfigError: The run has no tokenizer, or its rows do not come in files.
        DataError: The file or a row of it is not what the run reads.
    """
    path = local_path(path, what=_WHAT, error=DataError).expanduser()
    data, reading = run.config.data, (run.info.get("data") or {}).get("reading") or {}
    if path.suffix in _ARRAYS:
        return FileRows(_read_arrays(path))
    if reading.get("kind") == "table":
        shape = (run.info.get("data") or {}).get("input_shape") or [0]
        columns = read_input_columns(
            str(path),
            reading.get("columns"),
            num_columns=shape[0],
            target=getattr(data, "target", None),
        )
        return FileRows(columns)
    if isinstance(data, ImageFolderData):
        files = _image_paths(path)
        return FileRows(centered_images(files, image_size=data.image_size), files=tuple(map(str, files)))
    if head in ("token", "sequence", "regression", "embedding"):
        return _read_texts(run, path, of_words=head == "token")
    shown = (run.info.get("data") or {}).get("input_shape")
    raise ConfigError(
        f"{run.run_dir} was trained on data.kind={data.kind}, whose rows come in no file; give a .npy file of an array "
        f"[rows, {', '.join(map(str, shown or ['...']))}] as the model takes it"
    )


def _read_arrays(path: Path) -> np.ndarray:
    file = require_file(path, what=_WHAT)
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


def _read_texts(run: "OpenedRun", path: Path, *, of_words: bool) -> FileRows:
    data = run.config.data
    tokenizer = run.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"{run.run_dir} has no tokenizer.json, so it cannot read texts; give a .npy file of an array of tokens"
        )
    shape = (run.info.get("data") or {}).get("input_shape")
    length = shape[-1] if shape else getattr(run.config.model, "max_sequence_length", 0)
    tokens = framed_tokens(tokenizer, getattr(data, "tokenizer", None))
    if of_words:
        return _words(path, tokens, data.words if isinstance(data, TaggedTextData) else "words", length)
    columns = ["text"]
    if isinstance(data, LabelledTextData):
        columns = [data.text, *([data.second_text] if data.second_text else [])]
    texts = _texts(path, columns)
    return FileRows(text_rows(tokens, texts, sequence_length=length))


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


def _words(path: Path, tokens: FramedTokens, column: str, length: int) -> FileRows:
    if path.suffix == ".txt":
        words = [line.split() for line in _lines(require_file(path, what=_WHAT))]
    else:
        records = read_records(str(path), [(None, column)], what=_WHAT)
        listed = [list_of(record.values[0], where=record.where, column=column) for record in records]
        words = [[str(word) for word in row] for row in listed]
    found = framed_words(tokens, words, sequence_length=length)
    return FileRows(word_rows(tokens, found, sequence_length=length), words=words, places=found.places)


def _lines(file: Path) -> list[str]:
    """The lines of a text file without their ends; a file of one line end has one empty line."""
    text = decode_utf8(file.read_bytes(), path=file).removeprefix("\ufeff")
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")
