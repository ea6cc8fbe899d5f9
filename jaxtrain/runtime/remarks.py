"""Remarks of the program on standard error. No jax here."""

import sys


def print_remark(line: str) -> None:
    """Write a line to standard error in one write.

    `print` writes its line end separately, and another thread or process may write between the two.

    Args:
        line: without its line end.
    """
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
