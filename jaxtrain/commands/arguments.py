"""Arguments that several verbs take, and the types of their values. No jax here."""

import argparse
from typing import Any

_MOST, _MOST_PROCESSES = 10**9, 4096


def whole(text: str, least: int, most: int) -> int:
    """Read a whole number from `least` to `most`."""
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more, and at most {most}")
    return int(text)


def count(text: str) -> int:
    """Read a whole number of 1 or more."""
    return whole(text, 1, _MOST)


def process_count(text: str) -> int:
    """Read a number of processes or of emulated devices: 1 or more, and as many as a machine can start."""
    return whole(text, 1, _MOST_PROCESSES)


def step_number(text: str) -> int:
    """Read a whole number of 0 or more."""
    return whole(text, 0, _MOST)


def tokens(text: str) -> float:
    """Read a number of tokens: `15T`, `1.5B`, `300M`, `10e9`."""
    factor = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:].lower())
    return float(text) if factor is None else factor * float(text[:-1])


_SHARED: dict[str, dict[str, Any]] = {
    "config": {"metavar": "CONFIG", "help": "a shipped name (quickstart, ...), a YAML file or a run"},
    "overrides": {"metavar": "key=value", "nargs": "*", "help": "settings to change, as in train.steps=100"},
    "run_dir": {"metavar": "RUN_DIR", "help": "directory of a run, as in runs/quickstart"},
    "--emulate": {"type": process_count, "metavar": "N", "help": "emulate N CPU devices"},
    "--step": {"type": step_number, "metavar": "N", "help": "step to load; default: the newest intact one"},
    "--json": {"action": "store_true", "help": "print JSON"},
    "--quantize": {
        "choices": ("int8", "nf4"),
        "help": "weights of linear layers in int8, or in 4 bits (nf4); default: as they were trained",
    },
}


def add_shared(parser: argparse.ArgumentParser, *names: str) -> None:
    """Adds arguments that several verbs take: `config`, `overrides`, `run_dir`, `--emulate`, `--step` and so on."""
    for name in names:
        parser.add_argument(name, **_SHARED[name])
