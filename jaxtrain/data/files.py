"""Finds the files that a user names, lists them in the same order on every machine, and explains what is wrong."""

import glob
from collections.abc import Iterable
from pathlib import Path

from jaxtrain.config.local_path import local_path
from jaxtrain.errors import DataError

_GLOB_CHARACTERS = "*?["

# First bytes of files that are not text -> their format, and how to get text from them.
_NOT_TEXT = {
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "decompress it first: zstd -d {name}"),
    b"\x1f\x8b": ("compressed with gzip", "decompress it first: gunzip -k {name}"),
    b"\xfd7zXZ\x00": ("compressed with xz", "decompress it first: unxz -k {name}"),
    b"BZh": ("compressed with bzip2", "decompress it first: bunzip2 -k {name}"),
    b"\x04\x22\x4d\x18": ("compressed with lz4", "decompress it first: lz4 -d {name}"),
    b"PK\x03\x04": ("a zip archive", "unpack it first: unzip {name}"),
    b"PAR1": ("a Parquet file", "convert it to text first (JSON lines or CSV), for example with pandas or duckdb"),
    b"%PDF": ("a PDF", "extract its text first: pdftotext {name}"),
}
# Some editors begin UTF-8 files with it; it is not part of the text.
BYTE_ORDER_MARK = "\ufeff"

COMPRESSED_SUFFIXES = (".zst", ".gz", ".xz", ".bz2", ".lz4", ".zip")


def missing(path: Path, *, what: str) -> DataError:
    """Returns the error for a path that does not exist; the message names the nearest existing path."""
    absolute = path.absolute()
    nearest = next((parent for parent in absolute.parents if parent.exists()), absolute.anchor)
    return DataError(f"{what} {path} does not exist; the nearest existing path is {nearest}")


def require_file(path: str | Path, *, what: str) -> Path:
    """Returns `path` if it is a file with content.

    Args:
        path: What the user gave.
        what: Name of the path in the message, such as "data.path".

    Raises:
        DataError: The path does not exist, is a folder, or is an empty file.
    """
    path = local_path(path, what=what, error=DataError).expanduser()
    if not path.exists():
        raise missing(path, what=what)
    if path.is_dir():
        raise DataError(f"{what} {path} is a folder; give a file")
    if path.stat().st_size == 0:
        raise DataError(f"{what} {path} is empty; give a file with content")
    return path


def require_folder(path: str | Path, *, what: str) -> Path:
    """Returns `path` if it is a folder.

    Args:
        path: What the user gave.
        what: Name of the path in the message, such as "data.path".

    Raises:
        DataError: The path does not exist or is a file.
    """
    path = local_path(path, what=what, error=DataError).expanduser()
    if not path.exists():
        raise missing(path, what=what)
    if not path.is_dir():
        raise DataError(f"{what} {path} is a file; give a folder")
    return path


def find_files(path: str, *, suffix: str, what: str = "data.path") -> tuple[tuple[str, Path], ...]:
    """Lists the files that a path names: a file, a folder (all its files of one suffix, at any depth) or a glob.

    Args:
        path: What the user wrote.
        suffix: Ending of the files taken from a folder, such as ".txt".
        what: Where it was written, for messages.

    Returns:
        (name, file) pairs in the order of the names; a name is relative to the folder, so that it does not depend on
        the location of the folder.

    Raises:
        DataError: The path does not exist, a folder or glob matches no file, or a file is empty.
    """
    root = local_path(path, what=what, error=DataError).expanduser()
    if root.is_dir():
        files = [p for p in root.rglob("*") if p.is_file() and p.suffix == suffix]
        if not files:
            packed = sorted(p.name for p in root.rglob(f"*{suffix}.*") if p.suffix in COMPRESSED_SUFFIXES)
            if packed:
                raise DataError(
                    f"{what} {path} holds no {suffix} file but compressed ones ({packed[0]}); decompress them first"
                )
            raise DataError(f"{what} {path} holds no {suffix} file; give a folder with {suffix} files or a glob")
        return _named(files, root=root, what=what)
    if any(character in path for character in _GLOB_CHARACTERS) and not root.exists():
        files = [Path(p) for p in glob.glob(str(root), recursive=True) if Path(p).is_file()]
        if not files:
            raise DataError(f"{what} {path} matches no file; the nearest existing path is {_glob_root(root)}")
        return _named(files, root=_glob_root(root), what=what)
    if suffix == ".txt" and ".jsonl" in (root.suffix, *root.suffixes[-2:-1]):
        raise DataError(f"{what} {path} holds JSON lines, not plain text; set data.kind=jsonl")
    return ((root.name, require_file(root, what=what)),)


def _named(files: Iterable[Path], *, root: Path, what: str) -> tuple[tuple[str, Path], ...]:
    named = sorted((file.absolute().relative_to(root.absolute()).as_posix(), file) for file in files)
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


def check_is_text(path: Path) -> None:
    """Checks the first bytes of a file that could not be read as text.

    Raises:
        DataError: The file has a compressed or another known format; the message says how to get text from it.
    """
    with path.open("rb") as file:
        first = file.read(8)
    for magic, (format_name, works) in _NOT_TEXT.items():
        if first.startswith(magic):
            raise DataError(f"{path} is {format_name}, not text; {works.format(name=path.name)}") from None


def decode_utf8(content: bytes, *, path: Path, offset: int = 0) -> str:
    """Decodes a part of a text file.

    Args:
        content: The bytes of the part.
        path: The file, for the message.
        offset: Position of the part in the file, in bytes.

    Raises:
        DataError: The bytes are not UTF-8; the message names the file and the byte, or the format of the file.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        check_is_text(path)
        raise DataError(
            f"{path} is not UTF-8 at byte {offset + error.start} (0x{content[error.start]:02x}); "
            f"convert it, for example with: iconv -t UTF-8 {path.name}"
        ) from None
