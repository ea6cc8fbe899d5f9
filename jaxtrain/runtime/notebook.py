"""Tells whether this process is the kernel of a notebook. No jax here."""

import sys


def in_notebook() -> bool:
    """Returns whether what is displayed appears in a notebook, where standard error is shown as an error."""
    # A kernel has imported IPython before any code of the user runs; nothing else is worth importing it for.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ != "TerminalInteractiveShell"
