"""Options that a compiler may give up with: a program takes them in every process, or goes without them in every one.

What a compiler gave up with is noted in the folder of compiled programs, because jax keeps no failure there: a later
start of the same program goes without the options at once.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.runtime.agreement import told
from jaxtrain.runtime.compiler_options import CompilerOptions, Value
from jaxtrain.runtime.files import write_text_atomic

if TYPE_CHECKING:
    import jax

# Such failures say nothing about the program: another start may compile it with the options.
_PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED")
# What is read by the compilers beside the options of a program.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_LONGEST_REASON = 120
# Before a reason that a process tells the others, where it read it from a note.
_EARLIER = "at an earlier start: "


@dataclass(frozen=True)
class Taken:
    """A compiled program, and what became of the options that were tried.

    Attributes:
        compiled: The program.
        tried: Name -> value of the options that it was compiled with beside those that it has in any case.
        lines: A line that says which options it took or goes without; none where none was tried.
    """

    compiled: "jax.stages.Compiled"
    tried: Mapping[str, Value]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Attempt:
    """What came of compiling a program with the options that are tried, in this process.

    Attributes:
        lowered: The program, lowered with the options that it has in any case.
        compiled: The compiled program; None where the compiler gave up.
        gave_up: Why, in a few words; empty where it did not.
        note: The file that remembers it; None where nothing is to be remembered.
        was_known: Whether the file said so, so that nothing was compiled.
    """

    lowered: "jax.stages.Lowered"
    compiled: "jax.stages.Compiled | None"
    gave_up: str = ""
    note: Path | None = None
    was_known: bool = False

    @property
    def told(self) -> str:
        """What this process tells the others: why its compiler gave up, and whether that was at an earlier start."""
        return f"{_EARLIER}{self.gave_up}" if self.was_known else self.gave_up


def compile_trying(
    compile_with: "Callable[[Mapping[str, Value]], jax.stages.Compiled]", tried: Mapping[str, Value]
) -> Taken:
    """Compiles a program that this process alone compiles: with some more options, or without where it cannot be.

    Args:
        compile_with: Compiles with the options that it is given, beside those that the program has in any case.
        tried: The options to add; those of a user are not among them.

    Raises:
        jax.errors.JaxRuntimeError: The compiler gives up without them too.
    """
    if not tried:
        return Taken(compile_with({}), {}, ())
    try:
        return Taken(compile_with(tried), tried, (_with(tried),))
    except RuntimeError as error:
        why = _reason(error)  # the error itself would keep what the compiler held
    return Taken(compile_with({}), {}, (_without(tried, f": {why}"),))


def compile_together(lowered: "jax.stages.Lowered", options: CompilerOptions, mesh: Any) -> Taken:
    """Compiles a program in all processes that run it, with the options that are tried or, in every one, without.

    Where it runs on devices of several processes but not of all, nothing is tried: those cannot ask one another alone.

    Args:
        lowered: The program, lowered with `options.used`.
        options: What the program has in any case, and what is tried.
        mesh: The devices that run the program.

    Raises:
        UserError: Another process cannot go on.
        jax.errors.JaxRuntimeError: The compiler gives up without the options too.
    """
    import jax

    among = {device.process_index for device in mesh.devices.flat}
    if not options.tried or len(among) not in (1, jax.process_count()):
        return Taken(lowered.compile(), {}, ())
    if len(among) == 1:
        attempt = try_options(lowered, options, mesh)
        return settle(attempt, [attempt.told], options)
    attempt, everyone = told(lambda: try_options(lowered, options, mesh), tells=lambda attempt: attempt.told)
    return settle(attempt, everyone, options)


def try_options(lowered: "jax.stages.Lowered", options: CompilerOptions, mesh: Any) -> Attempt:
    """Compiles a program with the options that are tried, unless a note says that the compiler gives up with them.

    Args:
        lowered: The program, lowered with `options.used`.
        options: What the program has in any case, and what is tried.
        mesh: The devices that run the program.
    """
    if not options.tried:
        return Attempt(lowered, lowered.compile())
    note = _note_of(lowered, options, mesh)
    known = _read(note)
    if known:
        return Attempt(lowered, None, known, note, was_known=True)
    more: dict[str, Any] = {**options.tried}  # jax declares fewer types of values than it takes
    try:
        return Attempt(lowered, lowered.compile(compiler_options=more), note=note)
    except RuntimeError as error:
        why = _reason(error)
    return Attempt(lowered, None, why, None if why.startswith(_PASSING) else note)


def settle(attempt: Attempt, everyone: Sequence[str], options: CompilerOptions) -> Taken:
    """Takes the program of an attempt where no process gave up; else compiles it without the options.

    Args:
        attempt: Of this process.
        everyone: Of each process, in their order, what its attempt told; empty where its compiler did not give up.
        options: What the program has in any case, and what was tried.

    Raises:
        jax.errors.JaxRuntimeError: The compiler gives up without the options too.
    """
    tried = options.tried
    first = next((index for index, why in enumerate(everyone) if why), None)
    if first is None:
        assert attempt.compiled is not None, "no process gave up"
        return Taken(attempt.compiled, tried, (_with(tried),) if tried else ())
    why, are_several = everyone[first].removeprefix(_EARLIER), len(everyone) > 1
    where = f" on process {first}" if are_several else ""
    if why != everyone[first]:
        note = attempt.note if attempt.was_known else "it has a note"
        # Processes may keep their notes in folders of their own, and each note is enough to go without.
        which = "that of each process" if are_several else "it"
        where = f"{where} at an earlier start ({note}; delete {which} to try again)"
    compiled = attempt.lowered.compile()
    # Only once the program compiles without them are the options known to be what the compiler gave up with. A process
    # whose own compiler did not give up notes it too: the others would make it drop the options at each start.
    if attempt.note is not None and not attempt.was_known and not why.startswith(_PASSING):
        _write(attempt.note, why)
    return Taken(compiled, {}, (_without(tried, f"{where}: {why}"),))


def _with(tried: Mapping[str, Value]) -> str:
    return f"compiler: with {', '.join(tried)}"


def _without(tried: Mapping[str, Value], why: str) -> str:
    return f"compiler: goes without {', '.join(tried)}, with which it gave up{why}"


def _reason(error: RuntimeError) -> str:
    # What libtpu runs out of with such options (vmem) has a message of many lines; its first says which memory.
    return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__


def _note_of(lowered: "jax.stages.Lowered", options: CompilerOptions, mesh: Any) -> Path | None:
    """The file that says whether the compiler gives up on this very program; None where programs are not kept."""
    import jax
    import jaxlib.version

    # Attributes of jax.config are made at run time.
    folder: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not folder or "://" in folder:
        return None
    devices = list(mesh.devices.flat)
    decides = {
        "program": lowered.as_text(),
        "options": [sorted(options.used.items()), sorted(options.tried.items())],
        "compiler": [jax.__version__, jaxlib.version.__version__, devices[0].client.platform_version],
        # Kinds and places of the devices, and which process has which.
        "devices": [[device.device_kind, device.process_index, str(device)] for device in devices],
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    return Path(folder) / f"gave-up-{digest}.json"


def _read(note: Path | None) -> str:
    """Why the compiler gave up at an earlier start; empty where no note says so, and where it cannot be read."""
    if note is None:
        return ""
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    why = found.get("gave_up") if isinstance(found, dict) else None
    return " ".join(why.split())[:_LONGEST_REASON] if isinstance(why, str) else ""


def _write(note: Path, why: str) -> None:
    """Leave a note; where it cannot be written the next start tries the options again."""
    with contextlib.suppress(OSError):
        write_text_atomic(note, json.dumps({"gave_up": why}))
