"""Writes remarks of the program to standard error, or below the cell of a notebook. No jax here."""

import contextlib
import sys

from jaxtrain.config.secrets import redacted_text
from jaxtrain.runtime.notebook import in_notebook

# A terminal obeys these: it would recolour, retitle or overwrite what it shows, and some type text for the user.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Returns a text with its control characters, but for line ends and tabs, shown as escapes: `\\x1b`.

    Args:
        text: What names of files, data, tokenizers and checkpoints may be part of.
    """
    return text.translate(_CONTROLS)


def print_remark(line: str) -> None:
    """Writes a line to standard error in one write; in a notebook, which shows that in red, to standard output.

    `print` writes the line end separately, so that another thread or process may write between the two. A remark that
    cannot be written (the disk of a log is full) is lost, and nothing else. Passwords of addresses and tokens of
    well-known services are not shown.

    Args:
        line: The text of the line, without its line end.
    """
    stream = sys.stdout if in_notebook() else sys.stderr
    if stream is None:  # closed by whoever started this process
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = redacted_text(printable(line)).encode(encoding, errors="backslashreplace").decode(encoding)
    with contextlib.suppress(OSError):
        stream.write(f"{shown}\n")
        stream.flush()
