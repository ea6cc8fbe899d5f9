"""What this program writes to standard output and error, in a terminal or below the cell of a notebook. No jax here."""

import contextlib
import os
import sys
from typing import TextIO

from jaxtrain.config.secrets import redacted_text

# A terminal obeys these: it would recolour, retitle or overwrite what it shows, and some type text for the user.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def in_notebook() -> bool:
    """Whether what is displayed appears in a notebook, where standard error is shown as an error."""
    # A kernel has imported IPython before any code of the user runs; nothing else is worth importing it for.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ != "TerminalInteractiveShell"


def printable(text: str) -> str:
    """A text with its control characters, but for line ends and tabs, shown as escapes: `\\x1b`.

    Args:
        text: what names of files, data, tokenizers and checkpoints may be part of.
    """
    return text.translate(_CONTROLS)


def print_remark(line: str) -> None:
    """Write a line to standard error in one write; in a notebook, which shows that in red, to standard output.

    A remark that cannot be written (the disk of a log is full) is lost, and nothing else. Passwords of addresses and
    tokens of well-known services are not shown.

    Args:
        line: the text of the line, without its line end.
    """
    stream = sys.stdout if in_notebook() else sys.stderr
    if stream is None:  # closed by whoever started this process
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = redacted_text(printable(line)).encode(encoding, errors="backslashreplace").decode(encoding)
    with contextlib.suppress(OSError):
        stream.write(f"{shown}\n")
        stream.flush()


def drop_unwritten(stream: TextIO) -> None:
    """Let what a stream still holds go nowhere, or the interpreter complains about it as it ends."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test, or of a notebook, has no number
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
