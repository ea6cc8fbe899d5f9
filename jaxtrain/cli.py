"""The command line: parsing, and the one place where errors become exit codes.

What answers `--help` is all that is imported: the table of commands, whose work is imported when it runs.
"""

import argparse
import difflib
import errno
import os
import re
import shutil
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxtrain.commands.table import COMMANDS
from jaxtrain.errors import ConfigError, PreemptedError, UserError
from jaxtrain.runtime import host
from jaxtrain.runtime.devices import has_accelerator
from jaxtrain.runtime.terminal import drop_unwritten, own_output, print_remark

INTERNAL_ERROR = 1
INTERRUPTED = 130
BROKEN_PIPE = 141

# What the user, and not a defect, is the cause of.
_UNUSABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)

# Several processes of these would do the work several times, or stop each other.
_ALONE = (
    *("sweep", "serve", "report", "plan", "data prepare", "data show", "ckpt ls", "ckpt show"),
    *("submit slurm", "submit job", "submit jobset"),
)

_DESCRIPTION = "Train neural networks with JAX, unchanged, on NVIDIA GPUs, TPUs and CPUs."


class _Parser(argparse.ArgumentParser):
    """Reports a usage error as one line instead of printing the usage and leaving."""

    def error(self, message: str) -> NoReturn:
        # A list that may be empty is never what is missing.
        missing = message.removeprefix("the following arguments are required: ").removesuffix(", key=value")
        said = f"{missing} is missing" if message.startswith("the following") else message.removeprefix("argument ")
        raise _usage_error(self.prog, said)

    def print_help(self, file: Any = None) -> None:
        """Prints the help; argparse itself says nothing where it cannot be written."""
        print(self.format_help(), end="", file=file, flush=True)


def _usage_error(program: str, message: str) -> ConfigError:
    shows = "lists the commands" if program == "jaxtrain" else "shows what it takes"
    return ConfigError(f"{program}: {message}; '{program} --help' {shows}")


def _help(group: str = "") -> str:
    names = [name for name in COMMANDS if name.startswith(group)]
    width = max(map(len, names))
    listed = "\n".join(f"  {name:<{width}}  {COMMANDS[name].summary}" for name in names)
    return (
        f"usage: jaxtrain {group or 'COMMAND '}...\n\n{_DESCRIPTION}\n\ncommands:\n{listed}\n\n"
        "options everywhere:\n  --help     what a command takes\n  --debug    show the traceback of an error\n"
        "  --version  print the version\n\n"
        f"example: {COMMANDS[names[0]].example}"
    )


def _find_command(words: Sequence[str], *, wanted: str = "command") -> tuple[str, list[str]]:
    """The command that the words begin with, and the words after it.

    Args:
        words: at least one.
        wanted: what the first word could have been, for the message.

    Raises:
        ConfigError: no such command; names the nearest.
    """
    first, rest = words[0], list(words[1:])
    if first in COMMANDS:
        return first, rest
    members = [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{first} ")]
    if members:
        if rest and rest[0] in members:
            return f"{first} {rest[0]}", rest[1:]
        wrong = f"no command {rest[0]!r}" if rest else "no command"
        raise _usage_error(f"jaxtrain {first}", f"{wrong}, it has {' and '.join(members)}")
    known = {name.partition(" ")[0] for name in COMMANDS}
    close = difflib.get_close_matches(first, [*known, *COMMANDS], 1, 0.5)
    same_end = [name for name in COMMANDS if name.endswith(f" {first}")]
    guess = next(iter([*same_end, *close]), None)
    kind = "option" if first.startswith("-") else wanted
    raise _usage_error("jaxtrain", f"no {kind} {first!r}" + (f", did you mean {guess!r}?" if guess else ""))


def _parse(name: str, words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command; options may stand before, between and after its other words."""
    command = COMMANDS[name]
    inner: list[str] = []
    if command.takes_command and "--" in words:
        start = words.index("--")
        words, inner = words[:start], list(words[start + 1 :])
    parser = _Parser(
        prog=f"jaxtrain {name}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        epilog=f"example: {command.example}",
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    if "key=value" in parser.format_usage():
        # --train.steps=5 is train.steps=5; no option of ours has a dot.
        words = [word[2:] if re.match(r"--\w+\.[\w.]+=", word) else word for word in words]
    arguments, left = parser.parse_known_intermixed_args(words)
    options = re.findall(r"(?<!\S)--?[a-z][a-z-]*", parser.format_help())
    for word in left:
        option, equals, _ = word.partition("=")
        close = difflib.get_close_matches(option, options, 1, 0.7)
        if close:
            parser.error(f"no option {option}, did you mean {close[0]}?")
        if not option.startswith("-"):
            parser.error(f"{word!r} is one word too many")
        if "overrides" not in arguments or not option.startswith("--"):
            parser.error(f"no option {option}")
        if not equals:
            from jaxtrain.config.keys import nearest

            key = option[2:] if "." in option else nearest(option[2:].replace("-", "_"), {}) or option[2:]
            parser.error(f"no option {option}, and a key of the config is written {key}=VALUE")
        arguments.overrides.append(word[2:])
    if "=" in (getattr(arguments, "config", None) or ""):
        parser.error(f"CONFIG is missing before {arguments.config}")
    if command.takes_command:
        if not inner:
            parser.error(f"the command to run is missing after '--', as in {command.example!r}")
        program = _find_program(inner[0])
        arguments.is_program = program is not None
        arguments.command = (
            [program, *inner[1:]] if program is not None else _check_inner(name, inner, arguments.emulate)
        )
    return arguments


def _find_program(word: str) -> str | None:
    """The program that a command line begins with; None for a command of ours, and for what is neither."""
    if word in {name.partition(" ")[0] for name in COMMANDS}:
        return None
    found = shutil.which(word)
    # An environment that is used without being activated has its python beside this one, not on the path.
    return sys.executable if found is None and word in ("python", "python3") else found


def _check_inner(name: str, words: Sequence[str], emulate: int | None) -> list[str]:
    """The words of a command that is run by another: a mistake in them is reported once, before anything starts.

    Raises:
        ConfigError: the command, its arguments or its config are wrong.
    """
    from jaxtrain.config import load_config

    if words[0].endswith(".py") or "/" in words[0]:
        works = f"write: python {words[0]}" if os.path.isfile(words[0]) else "there is no such file"
        raise _usage_error(f"jaxtrain {name}", f"{words[0]!r} is not a program that can be started; {works}")
    inner, rest = _find_command(words, wanted="command or program")
    if COMMANDS[inner].takes_command:
        raise _usage_error(f"jaxtrain {name}", f"{inner!r} cannot be run inside {name!r}")
    if inner in _ALONE:
        raise ConfigError(
            f"jaxtrain {name}: {inner!r} works in one process; run it without {name}, as in: {COMMANDS[inner].example}"
        )
    options = [] if emulate is None else ["--emulate", str(emulate)]
    found = _parse(inner, [*options, *(word for word in rest if word != "--debug")])
    if getattr(found, "config", None) is not None:
        load_config(found.config, overrides=found.overrides)
    return [*words, *options]


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] == "--version":
        from jaxtrain import __version__

        print(f"jaxtrain {__version__}")
        return 0
    group = f"{words[0]} "
    if words[1:] in (["-h"], ["--help"]) and any(name.startswith(group) for name in COMMANDS):
        print(_help(group))
        return 0
    name, rest = _find_command(words)
    return COMMANDS[name].run(_parse(name, rest))


def _is_missing_platform(error: Exception) -> bool:
    """Whether jax found no device; for a known platform whose plugin is not installed it has only a bare assert."""
    if isinstance(error, RuntimeError):
        return "Unable to initialize backend" in str(error)
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, AssertionError) and bool(frames) and frames[-1].filename.endswith("xla_bridge.py")


def _explain(error: Exception) -> tuple[str, int]:
    """One line and the exit code for whatever a command raised."""
    text = str(error)
    if isinstance(error, UserError):
        line = " ".join(text.splitlines())
        # A usage error names its command itself.
        return (line if re.match(r"jaxtrain( \w+)*: ", line) else f"jaxtrain: {line}"), error.exit_code
    if "RESOURCE_EXHAUSTED" in text or isinstance(error, MemoryError):
        return (
            "jaxtrain: out of memory; lower train.global_batch_size, or set remat.policy=full, more "
            "train.accumulation_steps, or parallel.fsdp over more devices"
        ), ConfigError.exit_code
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    first = first if len(first) <= 300 else f"{first[:297]}..."
    if _is_missing_platform(error):
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = first or "none of them is on this machine"
        return f"jaxtrain: JAX_PLATFORMS={asked} (environment): {reason}; unset it, or see 'jaxtrain doctor'", 2
    if isinstance(error, OSError) and error.errno in _UNUSABLE:
        where = f" {error.filename}" if error.filename else ""
        return f"jaxtrain: cannot use{where or ' a file'}: {error.strerror}; free space or use another folder", 1
    return (
        f"jaxtrain: internal error: {type(error).__name__}: {first}; run again with --debug for the traceback"
    ), INTERNAL_ERROR


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the words after `jaxtrain`; None: those of this process.

    Returns:
        The exit code: 0 done, 2 config or usage, 3 data, 4 checkpoint, 5 diverged, 70 stood still or lost a process, 75
        stopped and saved, 130 Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and words[:1] in (["train"], ["bench"]):
        host.restart(accelerator=has_accelerator())
    if arguments is None and words[:1] == ["train"]:
        host.pause_collector()
        host.end_at_signals()
    # What stands behind "--" is for a command that is run by this one.
    end = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:end]
    try:
        code = _run([word for word in words[:end] if word != "--debug"] + words[end:])
        sys.stdout.flush()
        return code
    except SystemExit as leaving:  # argparse, after --help
        return int(leaving.code or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left. What is still buffered must go nowhere, or the interpreter complains as it ends.
        drop_unwritten(sys.stdout)
        return BROKEN_PIPE
    except Exception as error:
        if debug:
            print_remark(traceback.format_exc().rstrip("\n"))
        line, code = _explain(error)
        print_remark(line)
        met_by_all = isinstance(error, ConfigError | PreemptedError)
        if not met_by_all and not (isinstance(error, UserError) and error.raised_by_all):
            from jaxtrain.runtime import distributed

            distributed.leave(code)
        return code


def run_program() -> NoReturn:
    """Be the program `jaxtrain`: run the command of this process, and end with its exit code whatever threads do."""
    own_output()
    host.end_process(main())


if __name__ == "__main__":
    run_program()
