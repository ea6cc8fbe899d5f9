"""Finds the files that a user names, lists them in the same order on every machine, and explains what is wrong."""

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config.arguments import local_path
from jaxtrain.data.compression import UNPACKING_ERRORS, damaged, is_packed, open_unpacked, plain_suffix, read_unpacked
from jaxtrain.data.skipped import BadRecordError
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

# A line is held in memory as a whole; a file without line ends would be one line.
MAX_LINE_BYTES = 2**28

COMPRESSED_SUFFIXES = (".zst", ".gz", ".xz", ".bz2", ".lz4", ".zip")


@dataclass(frozen=True)
class FileState:
    """A file as it was when it was opened.

    Attributes:
        path: The file.
        num_bytes: Its size.
        modified_ns: When it was last written, in nanoseconds since 1970.
    """

    path: Path
    num_bytes: int
    modified_ns: int

    def check(self) -> None:
        """Checks that the file is as it was.

        Raises:
            DataError: It is gone, or was written since. Reading on would mix two versions of it; reading past the end
                of a file that is mapped into memory would end the process.
        """
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read any more ({error.strerror}); put it back") from None
        if (found.st_size, found.st_mtime_ns) != (self.num_bytes, self.modified_ns):
            sizes = "in its content" if found.st_size == self.num_bytes else f"to {found.st_size:,}"
            raise DataError(
                f"{self.path} of {self.num_bytes:,} bytes changed {sizes} while it was being read; put back what it "
                "was, and let nothing write to it during a run"
            )


def file_state(path: Path) -> FileState:
    """Returns a file as it is, to be compared with later."""
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); repair or remove it") from None
    return FileState(path, found.st_size, found.st_mtime_ns)


def read_file(path: Path) -> bytes:
    """Returns the content of a file, decompressed where its name ends in .gz or .zst.

    Raises:
        DataError: It cannot be read, or does not fit into memory.
    """
    try:
        return read_unpacked(path) if is_packed(path) else path.read_bytes()
    except MemoryError:
        raise DataError(f"{path} has {path.stat().st_size:,} bytes, which memory cannot hold; split it") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check its permissions") from None


def read_lines(path: Path) -> Iterator[bytes]:
    """Reads a file line by line, in bounded memory; decompressed where its name ends in .gz or .zst.

    Raises:
        DataError: It cannot be read, or a line is longer than 256 MiB.
    """
    try:
        with open_unpacked(path) as (file, _):
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise DataError(
                        f"{path}:{number} is a line of more than {MAX_LINE_BYTES:,} bytes; write one record per line"
                    )
                yield line
    except UNPACKING_ERRORS as error:
        raise damaged(path, error) from None


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
        DataError: The path does not exist, is a folder, a pipe or a device, or is an empty file.
    """
    path = local_path(path, what=what, error=DataError).expanduser()
    if not path.exists():
        raise missing(path, what=what)
    if path.is_dir():
        raise DataError(f"{what} {path} is a folder; give a file")
    if not path.is_file():
        raise DataError(f"{what} {path} is a pipe or a device, which cannot be read twice; give a file")
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
        suffix: Ending of the files taken from a folder, such as ".txt"; compressed ones (.txt.gz, .txt.zst) too, but
            where the same file lies decompressed beside it.
        what: Where it was written, for messages.

    Returns:
        (name, file) pairs in the order of the names; a name is relative to the folder, so that it does not depend on
        the location of the folder.

    Raises:
        DataError: The path does not exist, a folder or glob matches no file, or a file is empty.
    """
    root = local_path(path, what=what, error=DataError).expanduser()
    if root.is_dir():
        below = files_below(root)
        there = {p for p in below if plain_suffix(p) == suffix}
        files = [p for p in there if not (is_packed(p) and p.with_suffix("") in there)]
        if not files:
            packed = [p.name for p in below if p.suffix in COMPRESSED_SUFFIXES and p.stem.endswith(suffix)]
            if packed:
                raise DataError(
                    f"{what} {path} holds no {suffix} file but compressed ones ({packed[0]}); decompress them first"
                )
            raise DataError(f"{what} {path} holds no {suffix} file; give a folder with {suffix} files or a glob")
        return _named(files, root=root, what=what)
    if any(character in path for character in _GLOB_CHARACTERS) and not root.exists():
        _check_links(root)
        files = [Path(p) for p in glob.glob(str(root), recursive=True) if Path(p).is_file()]
        if not files:
            raise DataError(f"{what} {path} matches no file; the nearest existing path is {_glob_root(root)}")
        for file in sorted(files):
            _check_no_lines(file, suffix, what=what)
        return _named(files, root=_glob_root(root), what=what)
    _check_no_lines(root, suffix, what=what)
    return ((root.name, require_file(root, what=what)),)


def _check_no_lines(path: Path, suffix: str, *, what: str) -> None:
    """Raises a DataError where a file of JSON lines is to be read as plain text, braces and all."""
    if suffix == ".txt" and ".jsonl" in (path.suffix, *path.suffixes[-2:-1]):
        raise DataError(f"{what} {path} holds JSON lines, not plain text; set data.kind=jsonl")


def _named(files: Iterable[Path], *, root: Path, what: str) -> tuple[tuple[str, Path], ...]:
    named = sorted((file.absolute().relative_to(root.absolute()).as_posix(), file) for file in files)
    return tuple((name, require_file(file, what=what)) for name, file in named)


def _check_links(pattern: Path) -> None:
    """Raises a DataError where `**` would follow a link to a folder above it, again and again."""
    if "**" not in pattern.parts:
        return
    root = _glob_root(pattern)
    # Folder -> the real paths of it and of those above it.
    above = {str(root): {os.path.realpath(root)}}
    for folder, names, _ in os.walk(root, followlinks=True):
        chain = above.pop(folder)
        for name in names:
            path = os.path.join(folder, name)
            real = os.path.realpath(path)
            if real in chain:
                raise DataError(f"{path} links to {real}, which it lies in; remove the link, or give a narrower glob")
            above[path] = {*chain, real}


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
        BadRecordError: The bytes are not UTF-8; the message names the file and the byte.
        DataError: The file has another known format.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        # The first bytes of a compressed file say nothing about those that were decompressed.
        if not is_packed(path):
            check_is_text(path)
        raise BadRecordError(
            f"{path} is not UTF-8 at byte {offset + error.start} (0x{content[error.start]:02x}); "
            f"convert it, for example with: iconv -t UTF-8 {path.name}"
        ) from None
