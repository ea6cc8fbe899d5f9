"""`python -m jaxtrain` is the `jaxtrain` command; Ctrl-C while it is imported ends it with 130."""

import os
import signal
from typing import NoReturn


def run_program() -> NoReturn:
    """Run the `jaxtrain` command."""
    hears = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if hears:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from jaxtrain import cli

    if hears:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.run_program()


if __name__ == "__main__":
    run_program()
