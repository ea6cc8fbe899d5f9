"""What a command of `jaxtrain` is: a row of the table of commands, and the types of its arguments."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

_MOST, _MOST_PROCESSES = 10**9, 4096


@dataclass(frozen=True)
class Command:
    """One command: its line in the help, an example, its arguments and the function that runs it.

    With `takes_command`, the words after `--` are another command: they are checked and given as `arguments.command`,
    and `arguments.is_program` says that they begin with a program, not with a command of jaxtrain.
    """

    summary: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    takes_command: bool = False


def count(text: str) -> int:
    """Read a whole number of 1 or more."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return _in_range(text, _MOST)


def process_count(text: str) -> int:
    """Read a number of processes or of emulated devices: 1 or more, and as many as a machine can start."""
    count(text)
    return _in_range(text, _MOST_PROCESSES)


def step_number(text: str) -> int:
    """Read a whole number of 0 or more."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return _in_range(text, _MOST)


def _in_range(text: str, most: int) -> int:
    if len(text) > 10 or int(text) > most:
        raise argparse.ArgumentTypeError(f"{text[:20]} is too large; at most {most} is taken")
    return int(text)


def tokens(text: str) -> float:
    """Read a number of tokens: `15T`, `1.5B`, `300M`, `10e9`."""
    factor = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:].lower())
    return number(text) if factor is None else factor * number(text[:-1])


def number(text: str) -> float:
    """Read a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
