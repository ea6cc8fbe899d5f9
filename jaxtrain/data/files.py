"""Finds the files that a user names, in the same order on every machine, and reads them, compressed or not."""

import contextlib
import glob
import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.arguments import local_path
from jaxtrain.data.skipped import BadRecordError
from jaxtrain.errors import DataError

# Some editors begin UTF-8 files with it; it is not part of the text.
BYTE_ORDER_MARK = "\ufeff"

_GLOB_CHARACTERS = "*?["
# Endings of files that are decompressed while they are read, from their beginning to their end.
_PACKED_SUFFIXES = (".gz", ".zst")
# Blocks of a file that are hashed: enough to tell files apart without reading terabytes at every start.
_SAMPLED_BLOCKS, _BLOCK_BYTES = 16, 4096
# What libraries raise for a file that is damaged, cut off or of another format.
_FILE_ERRORS = (OSError, EOFError, ValueError, RuntimeError, zlib.error, tarfile.TarError)


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turns what a library raises for a file into a DataError of one line that names the file."""
    try:
        yield
    except ImportError as error:
        raise DataError(f"{path} needs {error.name}; run: pip install {error.name}") from None
    except _FILE_ERRORS as error:
        strerror = error.strerror if isinstance(error, OSError) else None
        reason = strerror or (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(f"{path} cannot be read ({reason}); repair it, or fetch it again") from None


def is_packed(path: Path) -> bool:
    """Returns whether a file is decompressed while it is read, by the ending of its name."""
    return path.suffix in _PACKED_SUFFIXES


def plain_suffix(path: Path) -> str:
    """Returns the ending of a file's name, without that of its compression: `.jsonl` of `a.jsonl.gz`."""
    return path.with_suffix("").suffix if is_packed(path) else path.suffix


def _opened(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), 2**20)  # pyright: ignore
    return path.open("rb")


def read_file(path: Path) -> bytes:
    """Returns the content of a file, decompressed where its name ends in .gz or .zst."""
    with reading(path), _opened(path) as file:
        return file.read()


def read_lines(path: Path) -> Iterator[bytes]:
    """Reads a file line by line, decompressed where its name ends in .gz or .zst."""
    with reading(path), _opened(path) as file:
        yield from file


def decode_utf8(content: bytes, *, path: Path, offset: int = 0) -> str:
    """Decodes a part of a text file, which begins at byte `offset`; a BadRecordError where it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRecordError(
            f"{path} is not UTF-8 at byte {offset + error.start} (0x{content[error.start]:02x}); decompress it, or "
            f"convert it, for example with: iconv -t UTF-8 {path.name}"
        ) from None


def sampled_sha256(path: Path) -> str:
    """Returns a hash of blocks of a file, from its beginning to its end, which tells versions of it apart."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for offset in np.linspace(0, max(0, size - _BLOCK_BYTES), _SAMPLED_BLOCKS).astype(int).tolist():
            file.seek(offset)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def require_file(path: str | Path, *, what: str) -> Path:
    """Returns `path` (`what` in messages) if it is a file with content, else raises a DataError."""
    path = _required(path, what=what)
    if path.is_dir():
        raise DataError(f"{what} {path} is a folder; give a file")
    if path.stat().st_size == 0:
        raise DataError(f"{what} {path} is empty; give a file with content")
    return path


def require_folder(path: str | Path, *, what: str) -> Path:
    """Returns `path` (`what` in messages) if it is a folder, else raises a DataError."""
    path = _required(path, what=what)
    if not path.is_dir():
        raise DataError(f"{what} {path} is a file; give a folder")
    return path


def _required(path: str | Path, *, what: str) -> Path:
    path = local_path(path, what=what, error=DataError).expanduser()
    if not path.exists():
        absolute = path.absolute()
        nearest = next((parent for parent in absolute.parents if parent.exists()), absolute.anchor)
        raise DataError(f"{what} {path} does not exist; the nearest existing path is {nearest}")
    return path


def files_below(root: Path) -> list[Path]:
    """Lists the files of a data folder, at any depth, in the order of their paths.

    Hidden files and folders are passed over: `._NAME` of macOS, `.ipynb_checkpoints/`, what a copy has not finished.
    """
    return sorted(p for p in root.rglob("*") if not is_hidden(p.relative_to(root).parts) and os.path.isfile(p))


def is_hidden(parts: Iterable[str]) -> bool:
    """Returns whether the parts of a path, seen from the data, name a hidden file or lie in a hidden folder."""
    return any(part.startswith(".") and part not in (".", "..") for part in parts)


def find_files(path: str, *, suffix: str, what: str = "data.path") -> tuple[tuple[str, Path], ...]:
    """Lists the files that a path names: a file, a folder (all its files of one suffix, at any depth) or a glob.

    Args:
        path: What the user wrote.
        suffix: Ending of the files taken from a folder, such as ".txt"; compressed ones (.txt.gz, .txt.zst) too.
        what: Where it was written, for messages.

    Returns:
        (name, file) pairs in the order of the names; a name is relative to the folder, so that it does not depend on
        the location of the folder.

    Raises:
        DataError: The path does not exist, a folder or glob matches no file, or a file is empty.
    """
    root = local_path(path, what=what, error=DataError).expanduser()
    is_glob = any(character in path for character in _GLOB_CHARACTERS) and not root.exists()
    if root.is_dir():
        files, start = [file for file in files_below(root) if plain_suffix(file) == suffix], root
        if not files:
            raise DataError(f"{what} {path} holds no {suffix} file; give a folder with {suffix} files or a glob")
    elif is_glob:
        start = _glob_root(root)
        files = [Path(found) for found in glob.glob(str(root), recursive=True) if os.path.isfile(found)]
        if not files:
            raise DataError(f"{what} {path} matches no file; the nearest existing path is {start}")
    else:
        files, start = [require_file(root, what=what)], root.parent
    if suffix == ".txt" and (lines := next((file for file in files if plain_suffix(file) == ".jsonl"), None)):
        raise DataError(f"{what} {lines} holds JSON lines, not plain text; set data.kind=jsonl")
    named = sorted((file.absolute().relative_to(start.absolute()).as_posix(), file) for file in files)
    return tuple((name, require_file(file, what=what)) for name, file in named)


def _glob_root(pattern: Path) -> Path:
    """Returns the longest existing folder before the first wildcard."""
    absolute = pattern.absolute()
    plain = Path(absolute.anchor)
    for part in absolute.parts[1:]:
        if any(character in part for character in _GLOB_CHARACTERS) or not (plain / part).is_dir():
            break
        plain /= part
    return plain
