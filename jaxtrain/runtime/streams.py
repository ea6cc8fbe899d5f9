"""Standard output and error of a command: closed by whoever started it, or on a disk that is full. No jax here."""

import contextlib
import io
import os
import sys
from typing import Any, TextIO

_is_of_results = False


def open_closed_streams() -> None:
    """Gives what is written to a standard stream that was closed (`>&-`) to nobody, as `>/dev/null` does.

    Otherwise the next file that is opened gets its number, and libraries would write their messages into that file.
    """
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        # Not by its number, which another file may have taken before.
        setattr(sys, name, open(os.devnull, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115


def own_output() -> None:
    """Makes this process the program `jaxtrain`, whose standard output is for results."""
    global _is_of_results
    _is_of_results = True


def keep_output_apart() -> None:
    """Lets standard output have what Python writes alone, where this process is the program `jaxtrain`.

    What libraries write to descriptor 1 goes to standard error: Gloo, whose C++ code names the processes that it
    connects at the first collective between them, would make `--json` unreadable.
    """
    if not _is_of_results:
        return
    with contextlib.suppress(AttributeError, OSError, ValueError):  # a stream of a test has no number
        if sys.stdout.fileno() != 1:
            return
        sys.stdout.flush()
        raw: Any = getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)
        kept = os.dup(1)
        os.dup2(2, 1)
        # The same objects with another number, since some hold the stream that they found as they were made.
        io.FileIO.__init__(raw, kept, "wb", closefd=False)


def write_error(stream: TextIO) -> OSError | None:
    """Returns why a stream that a write may have failed on cannot be written, or None where it can.

    What failed once is no longer held by the stream, so a line end is written to find out.
    """
    try:
        stream.flush()
        os.write(stream.fileno(), b"\n")
    except ValueError:  # a stream of a test, or of a notebook, has no number
        return None
    except OSError as error:
        return error
    return None


def has_unwritten(stream: TextIO) -> bool:
    """Returns whether a stream still holds what cannot be written."""
    try:
        stream.flush()
    except (OSError, ValueError):
        return True
    return False


def drop_unwritten(stream: TextIO) -> None:
    """Lets what a stream still holds go nowhere, or the interpreter complains about it as it ends."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test, or of a notebook, has no number
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
