"""The command line: one command, and the one place where errors become exit codes.

Only the table of the commands is imported at start; each command's module is imported when it runs.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from jaxtrain.commands.parsing import find_command, group_members, help_text, parse
from jaxtrain.commands.table import COMMANDS
from jaxtrain.errors import ConfigError, PreemptedError, StorageError, UserError, first_line
from jaxtrain.runtime import host
from jaxtrain.runtime.call import user_place
from jaxtrain.runtime.devices import has_accelerator
from jaxtrain.runtime.terminal import drop_unwritten, print_remark

INTERNAL_ERROR = 1
INTERRUPTED = 130
BROKEN_PIPE = 141


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text([*COMMANDS]))
        return 0
    if words[0] == "--version":
        from jaxtrain import __version__

        print(f"jaxtrain {__version__}")
        return 0
    members = group_members(words[0])
    if members and words[1:] in (["-h"], ["--help"]):
        print(help_text(members))
        return 0
    name, rest = find_command(words)
    return COMMANDS[name].run(parse(name, rest))


def _explain(error: Exception) -> tuple[str, int]:
    """Return the line and the exit code for whatever a command raised."""
    text = str(error)
    if isinstance(error, UserError):
        return " ".join(text.splitlines()), error.exit_code
    if "RESOURCE_EXHAUSTED" in text or isinstance(error, MemoryError):
        from jaxtrain.config.schema import TO_SAVE_MEMORY

        return f"out of memory; {TO_SAVE_MEMORY}", ConfigError.exit_code
    kind = type(error).__name__
    reason = first_line(error)
    if "Unable to initialize backend" in text or _is_of_backend(error):
        platforms = os.environ.get("JAX_PLATFORMS", "")
        line = f"JAX_PLATFORMS={platforms} (environment): {reason}; unset it, or see 'jaxtrain doctor'"
        return line, ConfigError.exit_code
    place = user_place(error)
    if place is not None:
        return f"{place} raised {kind}: {reason}; --debug shows the traceback", ConfigError.exit_code
    if isinstance(error, OSError) and error.strerror:
        path = error.filename or "a file"
        return f"cannot use {path}: {error.strerror}; free space or use another folder", StorageError.exit_code
    return f"internal error: {kind}: {reason}; run again with --debug for the traceback", INTERNAL_ERROR


def _is_of_backend(error: Exception) -> bool:
    """Return whether jax asserted, without a message, that the plugin of a platform is installed."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, AssertionError) and frames[-1].filename.endswith("xla_bridge.py")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the words after `jaxtrain`; None: those of this process.

    Returns:
        The exit code: 0 done, 2 config or usage, 3 data, 4 checkpoint, 5 diverged, 70 stood still or lost a process, 75
        stopped and saved, 130 Ctrl-C.
    """
    words = list(arguments or ())
    if arguments is None:
        words = sys.argv[1:]
        host.open_closed_streams()
        if words[:1] in (["train"], ["bench"]):
            host.restart(accelerator=has_accelerator())
        if words[:1] == ["train"]:
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
    """Print the line of an error, and end the cluster's other processes where they would wait for this one."""
    if debug:
        print_remark(traceback.format_exc().rstrip("\n"))
    line, code = _explain(error)
    if not line.startswith("jaxtrain"):  # a usage error names its command itself
        line = f"jaxtrain: {line}"
    print_remark(line)
    raised_by_all = isinstance(error, ConfigError | PreemptedError) or getattr(error, "raised_by_all", False)
    if not raised_by_all:
        from jaxtrain.runtime import distributed

        distributed.leave(code)
    return code


def run_program() -> NoReturn:
    """Run the command of this process, and end it with the exit code of the command whatever threads do."""
    host.end_process(main())
