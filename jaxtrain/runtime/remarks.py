"""Writes remarks of the program to standard error. No jax here."""

import sys


def print_remark(line: str) -> None:
    """Writes a line to standard error in one write.

    `print` writes the line end separately, so that another thread or process may write between the two.

    Args:
        line: The text of the line, without its line end.
    """
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
