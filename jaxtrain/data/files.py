"""Finds the files that a user names, in the same order on every machine, copies remote ones, and reads them.

Files may be compressed (.gz, .bz2, .xz, .zst). Remote ones (s3://, gs://, hf://, https://) are copied into a local
folder once, and again when they have changed.
"""

import contextlib
import fcntl
import glob
import hashlib
import importlib
import io
import json
import os
import re
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from jaxtrain.config.arguments import local_path
from jaxtrain.config.data import ChatData, Stored
from jaxtrain.config.secrets import redacted_text
from jaxtrain.errors import DataError, UserError, first_line
from jaxtrain.runtime.files import write_json_atomic, write_text_atomic
from jaxtrain.runtime.terminal import print_remark

# Some editors begin UTF-8 files with it; it is not part of the text.
BYTE_ORDER_MARK = "\ufeff"

_WILDCARD = re.compile(r"[*?[]")
# Ending of a compressed file -> module that decompresses it while it is read.
_PACKED_SUFFIXES = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "pyarrow"}
# Lines for the description of the data that is being opened, or None if none is.
_NOTES: ContextVar[list[str] | None] = ContextVar("notes", default=None)

# Scheme -> what pip installs to read it with fsspec.
_PACKAGES = {
    "s3": "'.[s3]'",
    "gs": "'.[gcs]'",
    "hf": "huggingface_hub",
    "http": "'.[data]'",
    "https": "'.[data]'",
}
# What stores call the value that changes with a file's content.
_TAGS = ("ETag", "etag", "blob_id", "md5Hash", "crc32c", "generation", "LastModified", "Last-Modified", "updated")
_LISTING = ".jaxtrain-files.json"


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turns any error that a library raises for a file into a DataError of one line that names the file."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise DataError(f"{path} needs {error.name}; run: pip install {error.name}") from None
    except Exception as error:  # each library has its own classes of errors for a damaged file
        reason = first_line(error).rstrip(".")
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        raise DataError(f"{path} cannot be read ({reason}); repair it, or download it again") from None


def is_packed(path: Path) -> bool:
    """Returns whether the ending of a file's name says that it is compressed."""
    return path.suffix.lower() in _PACKED_SUFFIXES


def plain_suffix(path: Path) -> str:
    """Returns the ending of a file's name in lower case, without that of its compression: `.jsonl` of `a.JSONL.gz`."""
    plain = path.with_suffix("") if is_packed(path) else path
    return plain.suffix.lower()


def _open(path: Path) -> Any:
    name = _PACKED_SUFFIXES.get(path.suffix.lower())
    if name is None:
        return path.open("rb")
    module = importlib.import_module(name)
    if name == "pyarrow":
        return io.BufferedReader(module.input_stream(str(path), compression="zstd"), 2**20)
    return module.open(path, "rb")


def read_file(path: Path) -> bytes:
    """Returns the content of a file, decompressed if its name says that it is compressed."""
    with reading(path), _open(path) as file:
        return file.read()


def read_lines(path: Path) -> Iterator[bytes]:
    """Reads a file line by line, decompressed if its name says that it is compressed."""
    with reading(path), _open(path) as file:
        yield from file


def decode_utf8(content: bytes, *, path: Path, offset: int = 0) -> str:
    """Decodes a part of a text file, which begins at byte `offset`; a DataError if it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 at byte {offset + error.start} (0x{content[error.start]:02x}); decompress it, or "
            f"convert it, for example with: iconv -t UTF-8 {path.name}"
        ) from None


def file_size(path: Path) -> int:
    """Returns the size of a file in bytes; a DataError if it is not there, such as at the end of a broken link."""
    with reading(path):
        return path.stat().st_size


def file_digests(paths: Iterable[Path]) -> list[str]:
    """Returns the SHA-256 of each file; several files are read at a time."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_digest, paths))


def _digest(path: Path) -> str:
    """Returns the SHA-256 of a file, from the user's cache folder unless the file was written since."""
    status = path.stat()
    # Content does not change without another change time.
    version = f"{path.resolve()} {status.st_size} {status.st_ino} {status.st_ctime_ns}"
    cached = _cache_folder(None) / "digests" / hashlib.sha256(os.fsencode(version)).hexdigest()
    if cached.exists():
        return cached.read_text()
    with reading(path), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # without a cache the file is read again at the next start
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(cached, digest)
    return digest


@contextlib.contextmanager
def data_notes() -> Iterator[list[str]]:
    """Collects the lines that `add_note` adds while data is opened."""
    notes: list[str] = []
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


def add_note(line: str) -> None:
    """Adds a line to the description of the data that is being opened, or prints it if none is."""
    notes = _NOTES.get()
    if notes is None:
        print_remark(line)
    elif line not in notes:
        notes.append(line)


def few(names: Sequence[str]) -> str:
    """Returns the first five names as text."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def require_file(path: str | Path, *, what: str) -> Path:
    """Returns `path` (`what` in messages) if it is a file with content, else raises a DataError."""
    path = _existing(path, what=what)
    if path.is_dir():
        raise DataError(f"{what} {path} is a folder; give a file")
    if path.stat().st_size == 0:
        raise DataError(f"{what} {path} is empty; give a file with content")
    return path


def require_folder(path: str | Path, *, what: str) -> Path:
    """Returns `path` (`what` in messages) if it is a folder, else raises a DataError."""
    path = _existing(path, what=what)
    if not path.is_dir():
        raise DataError(f"{what} {path} is a file; give a folder")
    return path


def _existing(path: str | Path, *, what: str) -> Path:
    path = local_path(path, what=what, error=DataError).expanduser()
    if not path.exists():
        nearest = next(parent for parent in path.absolute().parents if parent.exists())
        raise DataError(f"{what} {path} does not exist; the nearest existing path is {nearest}")
    return path


def files_below(root: Path) -> list[Path]:
    """Lists the files of a data folder, at any depth, in the order of their paths; links to folders are followed.

    Hidden files and folders are passed over: `._NAME` of macOS, `.ipynb_checkpoints/`, the part of an unfinished copy.
    """
    return sorted(_files_in(root, around=frozenset(root.resolve().parents)))


def _files_in(folder: Path, *, around: frozenset[Path]) -> list[Path]:
    files: list[Path] = []
    target = folder.resolve()
    if target in around:  # a link to a folder around it would be followed forever
        return files
    with reading(folder), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = folder / entry.name
            if entry.is_dir():
                files += _files_in(path, around=around | {target})
            else:
                files.append(path)
    return files


def choose_files(root: Path, files: Sequence[Path], is_read: Callable[[Path], bool], *, what: str) -> list[Path]:
    """Returns the files of a folder (`what` in messages) that are read, and adds a note about the others if any is."""
    read = [file for file in files if is_read(file)]
    if 0 < len(read) < len(files):
        left_out = [file.relative_to(root).as_posix() for file in files if not is_read(file)]
        add_note(f"{what} {root}: {len(left_out):,} of {len(files):,} files are left out ({few(left_out)})")
    return read


def is_hidden(parts: Iterable[str]) -> bool:
    """Returns whether the parts of a path below the data's folder name a hidden file or folder."""
    return any(part.startswith(".") and part not in (".", "..") for part in parts)


def find_files(
    path: str, *, suffixes: Sequence[str], notes: Collection[str] = (), what: str = "data.path"
) -> tuple[tuple[str, Path], ...]:
    """Lists the files that a path names: a file, a folder (its files of some suffixes, at any depth) or a glob.

    Files with the suffixes `notes` count only in a folder without the other suffixes. Compressed files (.txt.gz) of a
    suffix count; an empty file is an error.

    Returns:
        (name, file) pairs in the order of the names; a name is relative to the folder, so that it does not depend on
        the location of the folder.
    """
    root = local_path(path, what=what, error=DataError).expanduser()
    if root.is_dir():
        start = root
        files = files_below(root)
        present = {plain_suffix(file) for file in files} & {*suffixes}
        chosen = present.difference(notes) or present
        files = choose_files(root, files, lambda file: plain_suffix(file) in chosen, what=what)
    elif root.exists() or not _WILDCARD.search(path):
        start = root.parent
        files = [root]
    else:
        start = _glob_root(root)
        # A link that leads in a circle matches a file again and again.
        matches: dict[str, Path] = {}
        for match in sorted(glob.glob(str(root), recursive=True)):
            if os.path.isfile(match):
                matches.setdefault(os.path.realpath(match), Path(match))
        files = [*matches.values()]
    if not files:
        raise DataError(
            f"{what} {path} contains or matches no {' '.join(suffixes)} file ({start} holds "
            f"{few(sorted(os.listdir(start))) or 'nothing'}); give another path, or data.kind=image_folder for images"
        )
    start = start.absolute()
    named = sorted((file.absolute().relative_to(start).as_posix(), file) for file in files)
    return tuple((name, require_file(file, what=what)) for name, file in named)


def _glob_root(pattern: Path) -> Path:
    """Returns the longest existing folder before the first wildcard."""
    absolute = pattern.absolute()
    plain = Path(absolute.anchor)
    for part in absolute.parts[1:]:
        if _WILDCARD.search(part) or not (plain / part).is_dir():
            break
        plain /= part
    return plain


def with_local_paths(config: Any) -> Any:
    """Returns a data group whose addresses, if there are any, are replaced by the paths of local copies."""
    if not isinstance(config, Stored | ChatData):
        return config
    # Chats have no key for it: their copies lie in the user's cache folder.
    cache = config.cache if isinstance(config, Stored) else None
    changes: dict[str, Any] = {}
    for key in ("path", "validation_path"):
        value = getattr(config, key, None)
        if isinstance(value, str):
            changes[key] = local_copy(value, what=f"data.{key}", cache=cache)
        elif value is not None:
            changes[key] = tuple(local_copy(path, what=f"data.{key}", cache=cache) for path in value)
    return config.model_copy(update=changes)


def local_copy(path: str, *, what: str, cache: str | None) -> str:
    """Returns the path of a local copy of what an address names, or a local path unchanged.

    What is not there yet, or has changed, is copied into `cache`, or into the user's cache folder. An address names a
    file, a folder or a glob, and with https:// a file. `what` says where the address was written, for messages.
    """
    scheme, separator, _ = path.partition("://")
    if not separator or scheme not in _PACKAGES:
        return path
    root = _cache_folder(cache) / hashlib.sha256(path.encode()).hexdigest()[:16]
    with reading(root):
        root.mkdir(parents=True, exist_ok=True)
        # One process of this machine copies; the others wait, and find the files.
        with (root / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            names = _update_copies(path, root, what=f"{what} {redacted_text(path)}")
    return str(root / names[0]) if len(names) == 1 else str(root)


def _cache_folder(cache: str | None) -> Path:
    if cache is not None:
        return local_path(cache, what="data.cache", error=DataError).expanduser()
    if root := os.environ.get("JAXTRAIN_CACHE_DIR"):
        return Path(root).expanduser() / "data"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "jaxtrain" / "data"


def _update_copies(path: str, root: Path, *, what: str) -> list[str]:
    """Copies files that are missing or have changed, deletes others, and returns the names of the files in `root`."""
    listing = root / _LISTING
    # Name -> version of each file whose copy is complete.
    copied = json.loads(listing.read_text(encoding="utf-8")) if listing.exists() else {}
    try:
        system, files = _list_remote(path)
    except Exception as error:  # each client of a store has its own classes of errors
        if copied and not _is_refused(error):
            print_remark(f"{what} cannot be reached ({_reason(error)}); reading the copy in {root}")
            return list(copied)
        raise _unreachable(error, path, what) from None
    versions = {name: _version(info) for name, info in files.items()}
    missing = [name for name in files if copied.get(name) != versions[name] or not (root / name).is_file()]
    if missing:
        size = sum(files[name].get("size") or 0 for name in missing)
        print_remark(f"copying {len(missing):,} of {len(files):,} files ({size / 2**20:,.1f} MiB) of {what} to {root}")
    done = {name: version for name, version in versions.items() if name not in missing}
    for file in root.rglob("*"):  # what left the store, or was not copied completely
        if file.is_file() and file.relative_to(root).as_posix() not in {*done, _LISTING, ".lock"}:
            file.unlink()
    for name in missing:
        partial = root / ".partial"
        try:
            system.get_file(files[name]["name"], str(partial))
        except Exception as error:  # as above
            raise _unreachable(error, path, what) from None
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        partial.replace(root / name)
        done[name] = versions[name]
        write_json_atomic(listing, done)
    write_json_atomic(listing, done)
    return list(files)


def _list_remote(path: str) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Returns the file system of an address, and name -> description of each file that the address names."""
    import fsspec

    system, place = fsspec.core.url_to_fs(path)
    system.invalidate_cache()
    if path.startswith("http"):
        return system, {Path(urllib.parse.unquote(urllib.parse.urlsplit(path).path)).name: system.info(place)}
    before_wildcard = _WILDCARD.split(place, maxsplit=1)[0]
    if before_wildcard != place:
        found = system.glob(place, detail=True)
        root = before_wildcard.rpartition("/")[0]
    else:
        root = place.rstrip("/")
        found = system.find(place, detail=True)
        if list(found) == [root]:  # a single file
            root = root.rpartition("/")[0]
    files = {info["name"][len(root) :].lstrip("/"): info for info in found.values() if info["type"] == "file"}
    if not files or any(".." in Path(name).parts for name in files):
        raise FileNotFoundError(path)
    return system, files


def _version(info: dict[str, Any]) -> list[Any]:
    """Returns [size, tag] of a file in a store, by which a change is noticed."""
    return [info.get("size"), str(next((info[name] for name in _TAGS if info.get(name)), ""))]


def _is_refused(error: Exception) -> bool:
    """Returns whether a store answered that a file is not there, or may not be read."""
    if isinstance(error, PermissionError):
        return True
    # fsspec raises FileNotFoundError for a server that does not answer, too.
    cause = error.__cause__
    is_unanswered = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return isinstance(error, FileNotFoundError) and not is_unanswered


def _unreachable(error: Exception, path: str, what: str) -> DataError:
    """Returns the error to raise where a store raised `error`."""
    if isinstance(error, ImportError):
        return DataError(f"{what} needs a package; run: pip install {_PACKAGES[path.partition('://')[0]]}")
    if isinstance(error, PermissionError) or "redential" in f"{type(error).__name__} {error}":
        return DataError(f"access to {what} is denied ({_reason(error)}); check the credentials")
    if _is_refused(error):
        return DataError(f"{what} does not exist, or holds no file; check the address")
    reason = _reason(error.__cause__ or error)
    return DataError(f"{what} cannot be reached ({reason}); check the address and the network")


def _reason(error: BaseException) -> str:
    return redacted_text(first_line(error))
