"""Copies remote files (s3://, gs://, hf://, https://) into a local folder once, and checks the copies later."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from jaxtrain.config.arguments import local_path
from jaxtrain.config.data import ChatData, Stored
from jaxtrain.config.secrets import redacted_text
from jaxtrain.errors import DataError
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.terminal import print_remark

# Scheme -> the package that reads it; None: Python itself does.
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "http": None, "https": None}
# Package -> the extra that installs it, which checkpoints in object stores need too.
_EXTRAS = {"s3fs": "s3", "gcsfs": "gcs"}
_LISTING = ".jaxtrain-files.json"
_CHUNK_BYTES = 2**22
# Of a request that gets no answer.
_SECONDS = 60
_GLOB_CHARACTERS = "*?["


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store.

    Attributes:
        address: Where it is, as its store calls it.
        name: Relative to what the user named.
        num_bytes: Its size; None: the server does not say.
        tag: Changes when the content does (ETag, or the time of the last change); empty: the server gives none.
    """

    address: str
    name: str
    num_bytes: int | None
    tag: str


def is_remote(path: str) -> bool:
    """Returns whether a path is an address of a store that is read."""
    scheme, between, _ = path.partition("://")
    return bool(between) and scheme.lower() in _PACKAGES


def local_copy(path: str, *, what: str, cache: str | None) -> str:
    """Returns the local path of what an address names, which is copied where it is not there or has changed.

    Args:
        path: Of a file, a folder or a glob; https:// of a file alone. A local path is returned as it is.
        what: Where it was written, for messages.
        cache: Folder of the copies; None: the user's cache folder.

    Returns:
        A file, or a folder that holds what the address names and nothing else.

    Raises:
        DataError: A package, the credentials or the files are missing, the store cannot be reached and there is no
            copy, or a copy has another size than the store says.
    """
    if not is_remote(path):
        return path
    shown = redacted_text(path)
    try:
        urllib.parse.urlsplit(path)
    except ValueError as error:
        raise DataError(f"{what} {shown} is no address ({error}); write it as s3://bucket/folder/*.parquet") from None
    root = _cache_folder(cache) / hashlib.sha256(path.encode()).hexdigest()[:16]
    store = _open_store(path, f"{what} {shown}")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _own(root):
            return str(_brought_up_to_date(store, root, what=f"{what} {shown}"))
    except OSError as error:
        raise DataError(
            f"{what} {shown} cannot be copied to {root} ({error.strerror or error}); free space, or set data.cache"
        ) from None


def with_local_paths(config: Any) -> Any:
    """Returns a data group whose addresses are replaced by the paths of local copies.

    Args:
        config: A data group of any kind; one without addresses is returned as it is.

    Raises:
        DataError: As for `local_copy`.
    """
    if not isinstance(config, Stored | ChatData):
        return config
    # Chats have as many keys as a group should; their copies lie in the user's cache folder.
    cache = config.cache if isinstance(config, Stored) else None
    changes: dict[str, Any] = {}
    for key in type(config).model_fields.keys() & {"path", "validation_path"}:
        value = getattr(config, key)
        paths = [value] if isinstance(value, str) else list(value or ())
        copies = [local_copy(path, what=f"data.{key}", cache=cache) for path in paths]
        if copies != paths:
            changes[key] = copies[0] if isinstance(value, str) else tuple(copies)
    return config.model_copy(update=changes) if changes else config


def _cache_folder(cache: str | None) -> Path:
    if cache is not None:
        return local_path(cache, what="data.cache", error=DataError).expanduser()
    if root := os.environ.get("JAXTRAIN_CACHE_DIR"):
        return Path(root).expanduser() / "data"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "jaxtrain" / "data"


@contextlib.contextmanager
def _own(folder: Path) -> Iterator[None]:
    """Lets one process of this machine copy into a folder; the others wait, and find the files."""
    with (folder / ".lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Unreachable(Exception):
    """The store gave no answer, so that an earlier copy is better than nothing."""


class _Web:
    """A file behind http:// or https://."""

    def __init__(self, address: str):
        self._address = address
        self.is_one_file = True

    def files(self) -> list[RemoteFile]:
        name = Path(urllib.parse.unquote(urllib.parse.urlsplit(self._address).path)).name
        if not name or name in (".", ".."):
            raise FileNotFoundError
        with self._answer("HEAD") as answer:
            size = answer.headers.get("Content-Length")
            tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        return [RemoteFile(self._address, name, None if size is None else int(size), tag)]

    @contextlib.contextmanager
    def reading(self, file: RemoteFile) -> Iterator[IO[bytes]]:
        with self._answer("GET") as answer:
            yield answer

    def _answer(self, method: str) -> Any:
        request = urllib.request.Request(self._address, method=method, headers={"User-Agent": "jaxtrain"})
        try:
            return urllib.request.urlopen(request, timeout=_SECONDS)
        except urllib.error.HTTPError as error:
            if error.code in (404, 410):
                raise FileNotFoundError from None
            if error.code in (401, 403):
                raise PermissionError from None
            raise _Unreachable(f"the server answered {error.code}") from None
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise _Unreachable(str(getattr(error, "reason", error))) from None


class _Bucket:
    """Files of an object store, through fsspec."""

    def __init__(self, address: str):
        import fsspec

        self._system, self._path = fsspec.core.url_to_fs(address)
        self.is_one_file = False

    def files(self) -> list[RemoteFile]:
        self._system.invalidate_cache()
        if any(character in self._path for character in _GLOB_CHARACTERS):
            plain = self._path.split(next(c for c in self._path if c in _GLOB_CHARACTERS))[0]
            root, found = plain.rpartition("/")[0], self._system.glob(self._path, detail=True)
        else:
            root, found = self._path.rstrip("/"), self._system.find(self._path, detail=True)
            self.is_one_file = list(found) == [root]
            root = root.rpartition("/")[0] if self.is_one_file else root
        files = [info for info in found.values() if info["type"] == "file" and not info["name"].endswith("/")]
        if not files:
            raise FileNotFoundError
        return [
            RemoteFile(info["name"], info["name"][len(root) :].lstrip("/"), info.get("size"), _tag(info))
            for info in files
        ]

    @contextlib.contextmanager
    def reading(self, file: RemoteFile) -> Iterator[IO[bytes]]:
        with self._system.open(file.address, "rb") as opened:
            yield opened


def _tag(info: dict[str, Any]) -> str:
    names = ("ETag", "etag", "blob_id", "md5Hash", "crc32c", "generation", "LastModified", "updated", "mtime")
    return str(next((info[name] for name in names if info.get(name)), "")).strip('"')


def _open_store(path: str, what: str) -> _Web | _Bucket:
    scheme = urllib.parse.urlsplit(path).scheme.lower()
    package = _PACKAGES[scheme]
    if package is None:
        if any(character in urllib.parse.urlsplit(path).path for character in _GLOB_CHARACTERS):
            raise DataError(f"{what} is a pattern, and {scheme}:// lists no files; give the address of one file")
        return _Web(path)
    try:
        return _Bucket(path)
    except ImportError:
        raise DataError(f"{what} needs {package}; run: pip install 'jaxtrain[{_EXTRAS[package]}]'") from None


def _brought_up_to_date(store: _Web | _Bucket, root: Path, *, what: str) -> Path:
    """Copies what is missing or has changed, and returns the file or the folder."""
    saved = _saved(root)
    try:
        files = _answered(store.files, what=what)
    except _Unreachable as error:
        if saved and all(_is_there(root, name, entry) for name, entry in saved["files"].items()):
            print_remark(f"{what} cannot be reached ({error}); reading the copy in {root}")
            return root / next(iter(saved["files"])) if saved["is_one_file"] else root
        raise DataError(f"{what} cannot be reached ({error}); check the address and the network") from None
    known = saved["files"] if saved else {}
    for file in files:
        if ".." in Path(file.name).parts or Path(file.name).is_absolute():
            raise DataError(f"{what} holds a file called {file.name}, which would be copied elsewhere; rename it")
    missing = [file for file in files if not _is_same(root, file, known.get(file.name))]
    if missing:
        size = sum(file.num_bytes or 0 for file in missing)
        print_remark(f"copying {len(missing):,} of {len(files):,} files ({size / 2**20:,.1f} MiB) of {what} to {root}")
    # Files that left the store, and what a process that was ended copied without noting it.
    expected = {*(file.name for file in files), _LISTING, ".lock"}
    for path in root.rglob("*"):
        if path.is_file() and path.relative_to(root).as_posix() not in expected:
            path.unlink()
    entries = {name: entry for name, entry in known.items() if name in {file.name for file in files}}
    for file in missing:
        try:
            size = _copy(store, file, root / file.name, what=what)
        except _Unreachable as error:
            raise DataError(f"{what} broke off at {file.name} ({error}); run the same again, which goes on") from None
        entries[file.name] = {"num_bytes": size, "tag": file.tag}
        write_json_atomic(root / _LISTING, {"is_one_file": store.is_one_file, "files": entries})
    ordered = {file.name: entries[file.name] for file in files}
    write_json_atomic(root / _LISTING, {"is_one_file": store.is_one_file, "files": ordered})
    return root / files[0].name if store.is_one_file else root


def _copy(store: _Web | _Bucket, file: RemoteFile, path: Path, *, what: str) -> int:
    """Copies a file, which gets its name when it is complete, and returns its size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")

    def copy() -> None:
        with store.reading(file) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, _CHUNK_BYTES)
            target.flush()
            os.fsync(target.fileno())

    try:
        _answered(copy, what=what)
        size = partial.stat().st_size
        if file.num_bytes is not None and size != file.num_bytes:
            raise _Unreachable(f"{size:,} of {file.num_bytes:,} bytes came")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return size


def _answered(ask: Any, *, what: str) -> Any:
    """Returns the answer of a store.

    Raises:
        DataError: There is nothing at the address, or it may not be read.
        _Unreachable: There was no answer.
    """
    try:
        return ask()
    except (DataError, _Unreachable):
        raise
    except FileNotFoundError:
        raise DataError(f"{what} does not exist, or holds no file; check the address") from None
    except PermissionError:
        raise DataError(f"{what} may not be read; check the credentials, and who may read it") from None
    except OSError as error:
        if error.errno is not None and getattr(error, "filename", None):  # of this machine: the disk of the copies
            raise
        raise _Unreachable(_first(error)) from None
    except Exception as error:  # the clients of stores have errors of their own, by the dozen
        if "redential" in f"{type(error).__name__} {error}":
            raise DataError(
                f"{what} needs credentials ({_first(error)}); set them as for the store's own tools"
            ) from None
        raise _Unreachable(_first(error)) from None


def _first(error: Exception) -> str:
    return redacted_text((str(error).splitlines() or [type(error).__name__])[0][:200])


def _saved(root: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((root / _LISTING).read_text(encoding="utf-8"))
        return found if isinstance(found["files"], dict) and found["files"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_there(root: Path, name: str, entry: dict[str, Any]) -> bool:
    path = root / name
    return path.is_file() and path.stat().st_size == entry["num_bytes"]


def _is_same(root: Path, file: RemoteFile, entry: dict[str, Any] | None) -> bool:
    """Returns whether the copy of a file is there, of the size and the tag that the store says."""
    if entry is None or not _is_there(root, file.name, entry) or entry["tag"] != file.tag:
        return False
    return file.num_bytes is None or file.num_bytes == entry["num_bytes"]
