"""Words of the command line -> a command and its arguments; mistakes are one line with the nearest name. No jax."""

import argparse
import difflib
import re
from collections.abc import Sequence

from jaxtrain.commands.table import COMMANDS
from jaxtrain.errors import ConfigError


def help_text(names: Sequence[str]) -> str:
    """Return the help of `jaxtrain`, or of a group of its commands, such as `data`."""
    width = max(map(len, names))
    lines = [f"  {name:<{width}}  {COMMANDS[name].summary}" for name in names]
    return _HELP.format(commands="\n".join(lines), example=COMMANDS[names[0]].example)


_HELP = """\
usage: jaxtrain COMMAND ...

Train neural networks with JAX, unchanged, on NVIDIA GPUs, TPUs and CPUs.

commands:
{commands}

options everywhere:
  --help     arguments of a command
  --debug    show the traceback of an error
  --version  print the version

example: jaxtrain {example}"""


def group_members(first: str) -> list[str]:
    """Return the commands of a group, such as `data`: `data prepare` and `data show`."""
    return [name for name in COMMANDS if name.startswith(f"{first} ")]


def find_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the command that the words begin with, and the words after it.

    Raises:
        ConfigError: there is no such command.
    """
    for length in (1, 2):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name, list(words[length:])
    first = words[0]
    if members := group_members(first):
        raise ConfigError(f"jaxtrain {first}: its commands are {', '.join(members)}; see 'jaxtrain {first} --help'")
    close = difflib.get_close_matches(first, COMMANDS, 1, 0.5)
    guess = f", did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"jaxtrain: no command {first!r}{guess}; see 'jaxtrain --help'")


def parse(name: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words after the name of a command; options and `key=value` may stand in any order.

    Raises:
        ConfigError: an argument is wrong, is missing, or is not one of the command's.
    """
    parser = COMMANDS[name]
    end = words.index("--") if "--" in words else len(words)
    arguments, unknown = parser.parse_known_intermixed_args(words[:end])
    arguments.command = list(words[end + 1 :])
    options = re.findall(r"--?[a-z][a-z-]*", parser.format_usage())
    for word in unknown:
        option = word.partition("=")[0]
        if close := difflib.get_close_matches(option, options, 1, 0.7):
            parser.error(f"no option {option}, did you mean {close[0]}?")
        if "overrides" not in arguments or not re.match(r"--[\w.]+=", word):
            parser.error(f"unexpected argument {word!r}")
        # A key that is written as an option: --train.steps=5.
        arguments.overrides = [*arguments.overrides, word.removeprefix("--")]
    return arguments
