"""The command line: parsing, and the one place where errors become exit codes.

What answers `--help` is all that is imported: the table of verbs, whose work is imported when it runs.
"""

import argparse
import copy
import difflib
import errno
import os
import re
import shutil
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from jaxtrain.commands.table import COMMANDS, Parser
from jaxtrain.errors import ConfigError, PreemptedError, UserError
from jaxtrain.runtime import host
from jaxtrain.runtime.devices import has_accelerator
from jaxtrain.runtime.terminal import drop_unwritten, print_remark

INTERNAL_ERROR, INTERRUPTED, BROKEN_PIPE = 1, 130, 141

# What the user, and not a defect, is the cause of.
_UNUSABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)

# Several processes of these would do the work several times, or stop each other.
_ALONE = ("sweep", "serve", "report", "plan", "launch", "data", "ckpt", "submit")


def _usage_error(program: str, message: str) -> ConfigError:
    return ConfigError(f"{program}: {message}; see '{program} --help'")


def _help(group: str = "") -> str:
    names = [name for name in COMMANDS if name.startswith(group)]
    width = max(map(len, names))
    listed = "\n".join(f"  {name:<{width}}  {COMMANDS[name].summary}" for name in names)
    return (
        f"usage: jaxtrain {group or 'COMMAND '}...\n\n"
        "Train neural networks with JAX, unchanged, on NVIDIA GPUs, TPUs and CPUs.\n\n"
        f"commands:\n{listed}\n\n"
        "options everywhere:\n  --help     arguments of a command\n  --debug    show the traceback of an error\n"
        "  --version  print the version\n\n"
        f"example: jaxtrain {COMMANDS[names[0]].parser.example}"
    )


def _find_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The verb that the words begin with, and the words after it; an error names the nearest."""
    for length in (1, 2):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name, list(words[length:])
    first = words[0]
    members = [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{first} ")]
    if members:
        wrong = f"no command {words[1]!r}" if words[1:] else "no command"
        program, said = f"jaxtrain {first}", f"{wrong}, it has {' and '.join(members)}"
    else:
        same_end = [name for name in COMMANDS if name.endswith(f" {first}")]
        guess = [*same_end, *difflib.get_close_matches(first, [*COMMANDS, "data", "ckpt", "submit"], 1, 0.5)][:1]
        program, said = "jaxtrain", f"no command {first!r}" + "".join(f", did you mean {name!r}?" for name in guess)
    raise _usage_error(program, said)


def _parse(name: str, words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a verb; options may stand before, between and after its other words."""
    command, inner = COMMANDS[name], []
    parser = command.parser
    if name == "launch" and "--" in words:
        start = words.index("--")
        words, inner = words[:start], list(words[start + 1 :])
    if command.options is not None:
        parser = copy.deepcopy(parser)
        command.options(parser)
    # --train.steps=5 is train.steps=5; no option of ours has a dot.
    words = [word[2:] if re.match(r"--\w+\.[\w.]+=", word) else word for word in words]
    arguments, left = parser.parse_known_intermixed_args(words)
    for word in left:
        _take_unknown(parser, arguments, word)
    if "=" in (getattr(arguments, "config", None) or ""):
        parser.error(f"CONFIG is missing before {arguments.config}")
    if name == "launch":
        if not inner:
            parser.error(f"the command to run is missing after '--', as in 'jaxtrain {parser.example}'")
        _take_command(arguments, name, inner)
    return arguments


def _take_unknown(parser: Parser, arguments: argparse.Namespace, word: str) -> None:
    """Adds a key that is written as an option (`--seed=3`) to the settings; else an error names the nearest."""
    option, equals, _ = word.partition("=")
    close = difflib.get_close_matches(option, re.findall(r"(?<!\S)--?[a-z][a-z-]*", parser.format_help()), 1, 0.7)
    if close:
        parser.error(f"no option {option}, did you mean {close[0]}?")
    if not option.startswith("-"):
        parser.error(f"unexpected argument {word!r}")
    if "overrides" not in arguments or not option.startswith("--"):
        parser.error(f"no option {option}")
    if not equals:
        from jaxtrain.config.load import nearest_key

        key = option[2:] if "." in option else nearest_key(option[2:]) or option[2:]
        parser.error(f"no option {option}; write a config key as {key}=VALUE")
    arguments.overrides.append(word[2:])


def _take_command(arguments: argparse.Namespace, name: str, words: list[str]) -> None:
    """Adds the command that another runs: `command`, and `inner`, its arguments; None for a program.

    A mistake in a verb of ours is reported here, once, before anything starts.
    """
    arguments.command, arguments.inner = words, None
    if words[0] not in {known.partition(" ")[0] for known in COMMANDS}:
        # An environment that is used without being activated has its python beside this one, not on the path.
        program = shutil.which(words[0]) or (sys.executable if words[0] in ("python", "python3") else None)
        if program is not None:
            arguments.command = [program, *words[1:]]
            return
        if os.path.isfile(words[0]):
            raise _usage_error(f"jaxtrain {name}", f"{words[0]!r} is not a program; write: python {words[0]}")
    inner, rest = _find_command(words)
    if inner.partition(" ")[0] in _ALONE:
        alone = (
            f"{inner!r} works in one process; run it without {name}, as in: jaxtrain {COMMANDS[inner].parser.example}"
        )
        raise _usage_error(f"jaxtrain {name}", alone)
    options = [] if arguments.emulate is None else ["--emulate", str(arguments.emulate)]
    arguments.inner = _parse(inner, [*options, *(word for word in rest if word != "--debug")])
    arguments.command = [*words, *options]
    if getattr(arguments.inner, "config", None) is not None:
        from jaxtrain.config import load_config

        load_config(arguments.inner.config, overrides=arguments.inner.overrides)


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


def _explain(error: Exception) -> tuple[str, int]:
    """One line and the exit code for whatever a verb raised."""
    text = str(error)
    if isinstance(error, UserError):
        line = " ".join(text.splitlines())
        # A usage error names its verb itself.
        return (line if re.match(r"jaxtrain( \w+)*: ", line) else f"jaxtrain: {line}"), error.exit_code
    if "RESOURCE_EXHAUSTED" in text or isinstance(error, MemoryError):
        return (
            "jaxtrain: out of memory; lower train.global_batch_size, or set remat.policy=full, more "
            "train.accumulation_steps, or parallel.fsdp over more devices"
        ), ConfigError.exit_code
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]
    # jax asserts, without a message, that the plugin of a known platform is installed.
    frames = traceback.extract_tb(error.__traceback__)
    unmet = isinstance(error, AssertionError) and bool(frames) and frames[-1].filename.endswith("xla_bridge.py")
    if unmet or (isinstance(error, RuntimeError) and "Unable to initialize backend" in text):
        asked, reason = os.environ.get("JAX_PLATFORMS", ""), first or "none of them is on this machine"
        return f"jaxtrain: JAX_PLATFORMS={asked} (environment): {reason}; unset it, or see 'jaxtrain doctor'", 2
    if isinstance(error, RecursionError):
        return "jaxtrain: a config, a record of a run or a key is nested too deeply", ConfigError.exit_code
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"jaxtrain: {str(error.filename)[:60]!r}... is too long for a path; shorten it", ConfigError.exit_code
    if isinstance(error, OSError) and error.errno in _UNUSABLE:
        where = error.filename or "a file"
        return f"jaxtrain: cannot use {where}: {error.strerror}; free space or use another folder", 1
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
    if arguments is None:
        host.open_closed_streams()
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
        return _report_error(error, debug=debug)


def _report_error(error: Exception, *, debug: bool) -> int:
    """Prints the line of an error, and ends the cluster's other processes where they would wait for this one."""
    if debug:
        print_remark(traceback.format_exc().rstrip("\n"))
    line, code = _explain(error)
    print_remark(line)
    met_by_all = isinstance(error, ConfigError | PreemptedError) or getattr(error, "raised_by_all", False)
    if not met_by_all:
        from jaxtrain.runtime import distributed

        distributed.leave(code)
    return code


def run_program() -> NoReturn:
    """Be the program `jaxtrain`: run the command of this process, and end with its exit code whatever threads do."""
    host.end_process(main())


if __name__ == "__main__":
    run_program()
