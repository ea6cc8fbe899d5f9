"""What is left of a failed read or save of Orbax: one reason, and nothing that complains when it is freed.

Orbax reads and writes many arrays at once as coroutines of its own event loop. One that fails leaves the others behind,
pending. Python reports those when it frees them, as hundreds of lines that hide our one: warnings of coroutines that
were never awaited, errors of the `asyncio` logger, and exceptions given to `sys.unraisablehook`, which no option of
Orbax keeps back. So all of them are freed here, at a moment when such reports of Orbax are held back, and only then.
"""

import contextlib
import errno
import functools
import gc
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

from jaxtrain.checkpoint.places import Place
from jaxtrain.checkpoint.remote import RemotePath
from jaxtrain.checkpoint.space import SaveError
from jaxtrain.errors import CheckpointError

Found = TypeVar("Found")

# What keeps this machine from reading files that may be whole: rights, memory, descriptors, a file system that is away.
_OF_THIS_MACHINE = (
    errno.EACCES,
    errno.EPERM,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
)
_TEXTS_OF_THIS_MACHINE = (
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "UNAUTHENTICATED",
    "ABORTED",
    "CURL error",
    *(os.strerror(number) for number in _OF_THIS_MACHINE),
)

# Clients of object stores: what they raise is of the network, the service or the credentials, not of the content.
_CLIENTS = {"aiohttp", "botocore", "aiobotocore", "gcsfs", "google", "requests", "urllib3"}

# What a file system says in the middle of a long text.
_REASONS = (errno.ENOSPC, errno.EACCES, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.ESTALE)

# Reads that were started beside the one that failed cannot be cancelled or waited for from outside Orbax, and what they
# print as they end must still fall into the time in which it is held back. They end within this time.
_PENDING_READS_SECONDS = 0.5


class ReadError(Exception):
    """Arrays of a step could not be read.

    Args:
        reason: one short phrase.
        of_this_machine: the reason is permission or memory, which says nothing about the files.
    """

    def __init__(self, reason: str, *, of_this_machine: bool) -> None:
        super().__init__(reason)
        self.of_this_machine = of_this_machine


def silence_log() -> None:
    """Drop what Orbax logs: failures that it also raises, with tracebacks of hundreds of lines.

    What is still being written when one write has failed ends later, in threads of C++, and finds the event loop closed
    that would hear of it: each would print a traceback.
    """
    logging.getLogger("absl").addFilter(_without_orbax)
    _silence_closed_loops()


@functools.cache
def _silence_closed_loops() -> None:
    hook = sys.unraisablehook

    def without_closed_loops(unraisable: "sys.UnraisableHookArgs") -> None:
        error = unraisable.exc_value
        is_ours = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not is_ours or threading.current_thread() is threading.main_thread():
            hook(unraisable)

    sys.unraisablehook = without_closed_loops


def read_or_reason(read: Callable[[], Found]) -> Found:
    """Return what `read` gives; where it fails, free what it left pending.

    The argument is a function and this no context manager: a `with` statement would keep the error, and with it the
    pending reads, until the block has ended.

    Args:
        read: reads through Orbax.

    Raises:
        ReadError: with the reason only; what Orbax raises holds its pending reads and prints them when it is freed.
    """
    with _held_back():
        try:
            return read()
        except Exception as error:
            failure = ReadError(cause(error), of_this_machine=_is_of_this_machine(error))
            _free_frames(error)
        time.sleep(_PENDING_READS_SECONDS)
        # Frames and coroutines refer to one another, so that they are freed by the collector alone.
        gc.collect()
    raise failure


def read_in_background(read: Callable[[], Found]) -> Found:
    """Return what `read` gives, as `read_or_reason` does, in a thread beside that of the training.

    Nothing is held back unless it fails: what holds reports back belongs to the process, not to a thread.

    Args:
        read: reads through Orbax.

    Raises:
        ReadError: with the reason only.
    """
    try:
        return read()
    except Exception as error:
        failure = ReadError(cause(error), of_this_machine=_is_of_this_machine(error))
        with _held_back():
            _free_frames(error)
            time.sleep(_PENDING_READS_SECONDS)
            gc.collect()
    raise failure


def save_error(path: Place, error: BaseException) -> SaveError:
    """Turn whatever a save raised into one line, and free what it left pending."""
    failure = SaveError(f"cannot save checkpoint {path}: {cause(error)}")
    with _held_back():
        _free_frames(error)
        gc.collect()
    return failure


def store_failure(path: Place, error: Exception) -> Exception:
    """The SaveError for what a store refuses beside a save, so that the run goes on and the next save tries again.

    A disk is not away for a moment: its errors are returned as they are.
    """
    if isinstance(error, SaveError) or not isinstance(path, RemotePath):
        return error
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return SaveError(f"cannot save checkpoint {path}: {reason}")


@contextlib.contextmanager
def store_failures(path: Place) -> Iterator[None]:
    """Raise what `store_failure` gives."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        raise store_failure(path, error) from None


def cause(error: BaseException) -> str:
    """Return the reason at the root of an exception as one short phrase."""
    chain = _chain(error)
    for link in chain:
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
    text = str(chain[0])
    for number in _REASONS:
        if os.strerror(number) in text:
            return os.strerror(number)
    if text.startswith("NOT_FOUND"):
        return "its directory is gone"
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(chain[0]).__name__)
    # Of a chain of errors the last link is the reason.
    return line if len(line) <= 240 else f"{line[:100]} ... {line[-135:]}"


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _is_of_this_machine(error: BaseException) -> bool:
    return any(
        isinstance(link, PermissionError | MemoryError)
        or (isinstance(link, OSError) and link.errno in _OF_THIS_MACHINE)
        or any(text in str(link) for text in _TEXTS_OF_THIS_MACHINE)
        or type(link).__module__.partition(".")[0] in _CLIENTS
        for link in _chain(error)
    )


def _without_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _free_frames(error: BaseException) -> None:
    """Drop the local variables of every frame that the exception holds: the pending work is among them."""
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Hold back what pending work of Orbax reports when it ends or is freed; reports of other code pass."""
    hook, asyncio_logger = sys.unraisablehook, logging.getLogger("asyncio")
    disabled = asyncio_logger.disabled

    def without_reads(unraisable: "sys.UnraisableHookArgs") -> None:
        closed_loop = isinstance(unraisable.exc_value, RuntimeError) and "loop is closed" in str(unraisable.exc_value)
        code = getattr(unraisable.object, "cr_code", None)
        if not closed_loop and (code is None or "orbax" not in code.co_filename):
            hook(unraisable)

    sys.unraisablehook = without_reads
    asyncio_logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
            yield
    finally:
        sys.unraisablehook = hook
        asyncio_logger.disabled = disabled
