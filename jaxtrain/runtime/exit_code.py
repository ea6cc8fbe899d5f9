"""The exit code of a command, kept until its process has ended. No jax here.

As an interpreter ends, it ends every thread that asks for its lock. Where such a thread is inside C++ code, as in
`jax.device_put`, the process is aborted instead (Python 3.11 to 3.13; exit code 134). A cluster would not start a run
again that has stopped and saved (75).
"""

import atexit
import contextlib
import gc
import io
import os
import stat
import sys

_code: int | None = None


def keep() -> None:
    """Makes this process end at once after all that other code registers for its exit; call it before that code."""
    atexit.register(_end)


def set_code(code: int) -> None:
    """Sets the code with which a process that called `keep` ends, whatever its threads do."""
    global _code
    _code = code


def _end() -> None:
    if _code is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _flush_files()
    os._exit(_code)


def _flush_files() -> None:
    """Write what is buffered of files that own code left open, as an interpreter does as it ends.

    Not of pipes and sockets, whose reader may never read.
    """
    for one in gc.get_objects():
        if issubclass(type(one), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with contextlib.suppress(Exception):
                if stat.S_ISREG(os.fstat(one.fileno()).st_mode):
                    one.flush()
