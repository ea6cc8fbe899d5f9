"""Folders and objects of gs:// and s3://, written as far as checkpoints need them like a `Path`. No jax here.

An object store has no folders, no renaming and no appending: a folder is what names begin with, an object is replaced
whole, and what is "moved" is copied by the store and deleted. Both stores list what was written at once, so nothing is
remembered between two requests: other processes and libraries write too.
"""

import contextlib
import errno
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Self

from jaxtrain.config.arguments import store_address
from jaxtrain.errors import ConfigError

EXTRAS = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
# A request that is not answered is tried again by the clients; longer waits would look like a run that stands still.
_CONNECT_SECONDS, _READ_SECONDS = 10, 60
# s3fs asks in rounds of botocore's five requests: with its five rounds, a silent server would be waited for 25 minutes.
_S3_ROUNDS = 2
_LONGEST_REASON = 200
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
}


class RemotePath:
    """A folder or an object of a store; it needs not exist.

    It deliberately is no `os.PathLike`: a function for files of this machine would make a folder called `s3:`.

    Args:
        address: gs://bucket/name or s3://bucket/name.

    Raises:
        ConfigError: the address names no bucket, or no bucket can have that name.
    """

    def __init__(self, address: str) -> None:
        try:
            self.scheme, self.bucket, self.key = store_address(address)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def __str__(self) -> str:
        return f"{self.scheme}://{self._full}"

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> Self:
        return type(self)(f"{self}/{name}")

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self._full.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The folder that this one is in; the bucket is in itself."""
        return self if not self.key else type(self)(str(self).rpartition("/")[0])

    @property
    def parents(self) -> list[Self]:
        """The folders that this one is in, the nearest first."""
        return [] if not self.key else [self.parent, *self.parent.parents]

    @property
    def _full(self) -> str:
        return f"{self.bucket}/{self.key}" if self.key else self.bucket

    def names(self) -> list[str]:
        """Return the names of what is in this folder; empty where there is none.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        with _in_words(self):
            try:
                entries = _client(self.scheme).ls(self._full, detail=False, refresh=True)
            except FileNotFoundError:
                return []
        start = f"{self._full}/"
        names = (entry.rstrip("/").removeprefix(start) for entry in entries if entry.startswith(start))
        return sorted({name for name in names if name and "/" not in name})

    def files(self) -> list[str]:
        """Return the names of all objects below this folder, relative to it."""
        with _in_words(self):
            found = _client(self.scheme).find(self._full, refresh=True)
        start = f"{self._full}/"
        names = (entry.removeprefix(start) for entry in found if entry.startswith(start))
        return sorted(name for name in names if name and not name.endswith("/"))

    def is_dir(self) -> bool:
        """Whether an object is below this folder."""
        return bool(self.names())

    def exists(self) -> bool:
        """Whether there is an object of this name, or one below it."""
        with _in_words(self), contextlib.suppress(FileNotFoundError):
            _client(self.scheme).info(self._full, refresh=True)
            return True
        return False

    def is_symlink(self) -> bool:
        """Whether it is a link, which no store has."""
        return False

    def resolve(self) -> Self:
        """The same address: there are no links."""
        return self

    def read_bytes(self) -> bytes:
        """Return the content of an object.

        Raises:
            FileNotFoundError: there is none.
            OSError: the store does not answer, or refuses.
        """
        with _in_words(self):
            return _client(self.scheme).cat_file(self._full)

    def write_bytes(self, content: bytes, *, only_new: bool = False) -> None:
        """Write an object whole, which readers see at once or not at all.

        Args:
            content: of the object.
            only_new: whether an object that is there is left as it is. S3 compares and writes in one operation, and so
                does Google's store; its emulator does not.

        Raises:
            FileExistsError: `only_new`, and there is one.
            OSError: the store does not answer, or refuses.
        """
        with _in_words(self):
            _client(self.scheme).pipe_file(self._full, content, mode="create" if only_new else "overwrite")

    def delete_marks(self) -> None:
        """Delete the objects whose names end in a slash, by which some tools mark a folder."""
        with _in_words(self), contextlib.suppress(FileNotFoundError):
            _client(self.scheme).rm(self._full, recursive=True)

    def delete(self) -> None:
        """Delete an object; nothing happens where there is none."""
        with _in_words(self), contextlib.suppress(FileNotFoundError):
            _client(self.scheme).rm_file(self._full)

    def copy_to(self, target: "RemotePath") -> None:
        """Let the store copy an object to another name in the same store."""
        with _in_words(self):
            _client(self.scheme).cp_file(self._full, target._full)

    def upload(self, local: Any, advance: Callable[[int], None]) -> None:
        """Write an object with the content of a file of this machine; `advance` gets the bytes of each part."""
        with _in_words(self):
            _client(self.scheme).put_file(str(local), self._full, callback=_telling(advance))

    def download(self, local: Any, advance: Callable[[int], None]) -> None:
        """Write a file of this machine with the content of the object; `advance` gets the bytes of each part."""
        with _in_words(self):
            _client(self.scheme).get_file(self._full, str(local), callback=_telling(advance))


def _telling(advance: Callable[[int], None]) -> Any:
    """What the clients call with the bytes so far; a large object takes longer than what stands still may."""
    from fsspec.callbacks import Callback

    told = 0

    def tell(size: int | None, value: int) -> None:
        nonlocal told
        advance(value - told)
        told = value

    return Callback(hooks={"advance": tell})


def check_client(path: RemotePath) -> None:
    """Raise where the package is missing that speaks to the store.

    Raises:
        ConfigError: names the extra.
    """
    import importlib.util

    package, extra = EXTRAS[path.scheme]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{path} needs the package {package}: pip install 'jaxtrain[{extra}]'")


@functools.cache
def _client(scheme: str) -> Any:
    """The client of a store: one of its own, without a memory of listings."""
    import fsspec

    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme == "s3":
        options["config_kwargs"] = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS}
        client = fsspec.filesystem("s3", **options)
        client.retries = _S3_ROUNDS
        return client
    import importlib

    # It logs, with a traceback, what it raises too.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # Without a total: by default what takes five minutes is given up, however much has come.
    wait = importlib.import_module("aiohttp").ClientTimeout(
        total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS
    )
    return fsspec.filesystem("gcs", requests_timeout=wait, **options)


def forget_listings(scheme: str) -> None:
    """Drop what the client remembers that Orbax uses: it was listed before others wrote."""
    import fsspec

    client = fsspec.filesystem("gcs", finalize_on_close=True) if scheme == "gs" else fsspec.filesystem("s3")
    client.invalidate_cache()


@contextlib.contextmanager
def _in_words(path: RemotePath) -> Iterator[None]:
    """Turn what the clients raise into an OSError whose `strerror` is one short reason.

    The clients raise errors of their own libraries, of the event loop's, of the ones that look for credentials.
    """
    try:
        yield
    except FileNotFoundError as error:
        # The clients leave out the number, by which a caller tells what is gone from what cannot be reached.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    except FileExistsError:
        raise
    except (KeyboardInterrupt, SystemExit, ConfigError):
        raise
    except Exception as error:
        number, reason = reason_of(path, error)
        raise OSError(number, reason) from error


def reason_of(path: RemotePath, error: BaseException) -> tuple[int, str]:
    """Return the number of the error that a file system would have given, and the reason in words."""
    kind, text = type(error).__name__, " ".join(str(error).split())
    if "Credential" in kind or "RefreshError" in kind or "Credential" in text or "Anonymous caller" in text:
        return errno.EACCES, f"no credentials for {path.scheme}://: {_CREDENTIALS[path.scheme]}"
    if isinstance(error, PermissionError) or text.startswith(("Forbidden", "AccessDenied")):
        return errno.EACCES, f"access denied by {path.scheme}://{path.bucket}"
    strerror = error.strerror if isinstance(error, OSError) and error.strerror else ""
    reason = strerror or text or kind
    return errno.EIO, reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 3]}..."
