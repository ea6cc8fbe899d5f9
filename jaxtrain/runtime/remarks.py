"""Writes remarks of the program to standard error, or below the cell of a notebook. No jax here."""

import sys

from jaxtrain.runtime.notebook import in_notebook


def print_remark(line: str) -> None:
    """Writes a line to standard error in one write; in a notebook, which shows that in red, to standard output.

    `print` writes the line end separately, so that another thread or process may write between the two.

    Args:
        line: The text of the line, without its line end.
    """
    stream = sys.stdout if in_notebook() else sys.stderr
    stream.write(f"{line}\n")
    stream.flush()
