"""Copies remote files (s3://, gs://, hf://, https://) into a local folder once, and again where they have changed."""

import fcntl
import hashlib
import json
import os
import urllib.parse
from pathlib import Path
from typing import Any

from jaxtrain.config.arguments import local_path
from jaxtrain.config.data import ChatData, Stored
from jaxtrain.config.secrets import redacted_text
from jaxtrain.data.files import reading
from jaxtrain.errors import DataError
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.terminal import print_remark

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


def is_remote(path: str) -> bool:
    """Returns whether a path is an address of a store that is read."""
    scheme, between, _ = path.partition("://")
    return bool(between) and scheme in _PACKAGES


def with_local_paths(config: Any) -> Any:
    """Returns a data group whose addresses, if there are any, are replaced by the paths of local copies."""
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


def local_copy(path: str, *, what: str, cache: str | None) -> str:
    """Returns the local path of what an address names, which is copied where it is not there or has changed.

    Args:
        path: Of a file, a folder or a glob; https:// of a file alone. A local path is returned as it is.
        what: Where it was written, for messages.
        cache: Folder of the copies; None: the user's cache folder.

    Returns:
        A file, or a folder that holds what the address names and nothing else.

    Raises:
        DataError: A package, the credentials or the files are missing, or the store cannot be reached and there is no
            copy.
    """
    if not is_remote(path):
        return path
    root = _cache_folder(cache) / hashlib.sha256(path.encode()).hexdigest()[:16]
    with reading(root):
        root.mkdir(parents=True, exist_ok=True)
        # One process of this machine copies; the others wait, and find the files.
        with (root / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            names = _brought_up_to_date(path, root, what=f"{what} {redacted_text(path)}")
    return str(root / names[0]) if len(names) == 1 else str(root)


def _cache_folder(cache: str | None) -> Path:
    if cache is not None:
        return local_path(cache, what="data.cache", error=DataError).expanduser()
    if root := os.environ.get("JAXTRAIN_CACHE_DIR"):
        return Path(root).expanduser() / "data"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "jaxtrain" / "data"


def _brought_up_to_date(path: str, root: Path, *, what: str) -> list[str]:
    """Copies what is missing or has changed, and returns the names of the files in the folder of copies."""
    listing = root / _LISTING
    # Name -> [size, tag] of each file that was copied whole.
    known = json.loads(listing.read_text(encoding="utf-8")) if listing.exists() else {}
    try:
        system, files = _listed(path)
    except Exception as error:  # the clients of stores have errors of their own, by the dozen
        if known and not _is_refused(error):
            print_remark(f"{what} cannot be reached ({_first(error)}); reading the copy in {root}")
            return list(known)
        raise _explained(error, path, what) from None
    missing = {
        name: info for name, info in files.items() if known.get(name) != _version(info) or not (root / name).is_file()
    }
    if missing:
        size = sum(info.get("size") or 0 for info in missing.values())
        print_remark(f"copying {len(missing):,} of {len(files):,} files ({size / 2**20:,.1f} MiB) of {what} to {root}")
    for there in root.rglob("*"):  # what left the store, or was not copied whole
        name = there.relative_to(root).as_posix()
        if there.is_file() and name not in (_LISTING, ".lock") and (name not in files or name in missing):
            there.unlink()
    done = {name: _version(info) for name, info in files.items() if name not in missing}
    for name, info in missing.items():
        partial = root / ".partial"
        try:
            system.get_file(info["name"], str(partial))
        except Exception as error:  # as above
            raise _explained(error, path, what) from None
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        partial.replace(root / name)
        done[name] = _version(info)
        write_json_atomic(listing, done)
    write_json_atomic(listing, done)
    return list(files)


def _listed(path: str) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Returns the file system of an address, and name -> description of each file that the address names."""
    import fsspec

    system, place = fsspec.core.url_to_fs(path)
    system.invalidate_cache()
    if path.startswith("http"):
        return system, {Path(urllib.parse.unquote(urllib.parse.urlsplit(path).path)).name: system.info(place)}
    if any(character in place for character in "*?["):
        plain = place.split(next(character for character in place if character in "*?["))[0]
        root, found = plain.rpartition("/")[0], system.glob(place, detail=True)
    else:
        root, found = place.rstrip("/"), system.find(place, detail=True)
        root = root.rpartition("/")[0] if list(found) == [root] else root
    files = {info["name"][len(root) :].lstrip("/"): info for info in found.values() if info["type"] == "file"}
    if not files or any(".." in Path(name).parts for name in files):
        raise FileNotFoundError(path)
    return system, files


def _version(info: dict[str, Any]) -> list[Any]:
    return [info.get("size"), str(next((info[name] for name in _TAGS if info.get(name)), ""))]


def _is_refused(error: Exception) -> bool:
    """Returns whether a store answered that a file is not there, or may not be read."""
    # fsspec says of a server without an answer, too, that a file is not there.
    unanswered = isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError)
    return isinstance(error, PermissionError) or (isinstance(error, FileNotFoundError) and not unanswered)


def _explained(error: Exception, path: str, what: str) -> DataError:
    if isinstance(error, ImportError):
        return DataError(f"{what} needs a package; run: pip install {_PACKAGES[path.partition('://')[0]]}")
    if isinstance(error, PermissionError) or "redential" in f"{type(error).__name__} {error}":
        return DataError(f"{what} may not be read ({_first(error)}); check the credentials")
    if _is_refused(error):
        return DataError(f"{what} does not exist, or holds no file; check the address")
    return DataError(
        f"{what} cannot be reached ({_first(error.__cause__ or error)}); check the address and the network"
    )


def _first(error: BaseException) -> str:
    return redacted_text((str(error).splitlines() or [type(error).__name__])[0][:200])
