"""How many bytes of its memory a compiled program reads and writes, counted instruction by instruction. No jax here.

XLA's own figure (`cost_analysis()["bytes accessed"]`) is none for a GPU, and for a TPU it counts the body of a loop
once, however often it runs, and every branch of a condition.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.plan.compilers.program_text import Instruction, Program, number_of, read_program

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f16": 16, "token": 0}
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")

_SLICES = ("dynamic-slice", "slice")
# Operand that holds the new numbers; operand 0 is changed in place.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_SAME = ("bitcast", "reshape", "get-tuple-element")
# Of a fusion inside a fusion: its result is its operand, in tiles of another size.
_ALIAS = "output_to_operand_aliasing={{}: (0, {})}"
# What names bytes without moving them, or ends a transfer that was counted where it began.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
}


@dataclass(frozen=True)
class Moved:
    """Bytes that one instruction moves in a run of the program.

    Attributes:
        name: of the instruction.
        bytes: read and written, all its runs together.
        runs: how often it runs.
        result: shapes of its result.
    """

    name: str
    bytes: float
    runs: int
    result: str


Computation = Mapping[str, Instruction]


def moved_bytes(program: str, *, unknown_trips: int = 1) -> list[Moved]:
    """Count what each instruction reads from the memory of a device, and writes to it; the largest come first.

    An operand that is sliced inside the instruction counts with its slice, one that is updated in place with the
    update. What a TPU holds in a core's own memory counts nothing. A condition takes the branch that moves least: in a
    decode step that of greedy rows of whose tokens no alternatives are reported. Caches of a processor are not known.

    Args:
        program: `as_text()` of a compiled program.
        unknown_trips: how often loops run whose number of turns is not in the program.
    """
    read, found = read_program(program), list[Moved]()
    _count(read, read.entry, unknown_trips, 1, found)
    return sorted(found, key=lambda one: -one.bytes)


def _size(type_text: str, *, everywhere: bool = False) -> float:
    """Bytes of the arrays of a type; those in a core's own memory only where `everywhere`."""
    total = 0.0
    for kind, dims, layout in _ARRAY.findall(type_text):
        bits = _BITS.get(kind) or int((re.search(r"\d+", kind) or ["0"])[0])
        if everywhere or "S(" not in layout:
            total += bits / 8 * math.prod(int(dim) for dim in dims.split(",") if dim)
    return total


def _called(instruction: Instruction, key: str) -> str:
    found = re.search(rf"\b{key}=\{{?%?([\w.-]+)", instruction.rest)
    assert found is not None, f"{instruction.kind} without {key}"
    return found[1]


def _count(program: Program, name: str, unknown_trips: int, runs: int, found: list[Moved]) -> float:
    """Bytes of one run of a computation; appends its instructions, each with all `runs` of it."""
    computation, total = program.named[name], 0.0
    for key, one in computation.items():
        types = [computation[operand].result for operand in one.operands if operand in computation]
        if one.kind in _FREE or one.kind.endswith("-done"):
            continue
        if one.kind == "while":
            trips = program.turns(one, list(computation.values()), unknown=unknown_trips)
            total += trips * _count(program, _called(one, "body"), unknown_trips, runs * trips, found)
        elif one.kind == "conditional":
            branches = [
                (_count(program, branch, unknown_trips, runs, listed), listed)
                for branch in one.called
                for listed in [[]]
            ]
            least, listed = min(branches, key=lambda branch: branch[0])
            found += listed
            total += least
        elif one.kind in ("call", "async-start"):
            inner = _called(one, "to_apply" if one.kind == "call" else "calls")
            total += _count(program, inner, unknown_trips, runs, found)
        else:
            moved = _moved(one, types, computation, program)
            total += moved
            if moved:
                found.append(Moved(key, moved * runs, runs, one.result))
    return total


def _moved(one: Instruction, types: list[str], computation: Computation, program: Program) -> float:
    """Bytes that one run of an instruction reads and writes."""
    result = _size(one.result, everywhere=True)
    if one.kind == "fusion":
        return _fused(one, types, program)
    if one.kind in (*_SLICES, "gather"):
        return (_size(types[0]) > 0) * result + _size(one.result)
    if one.kind in _UPDATES:
        return 2 * _size(computation[one.operands[_UPDATES[one.kind]]].result, everywhere=True)
    if one.kind in ("copy-start", "slice-start"):
        # The type lists what is read too: (target, source, context), or ((source), target, context).
        target = _ARRAY.findall(one.result)[0 if one.kind == "copy-start" else 1]
        written = f"{target[0]}[{target[1]}]{{{target[2]}}}"
        return (_size(types[0]) > 0) * _size(written, everywhere=True) + _size(written)
    if one.kind.endswith("-start"):
        return 2 * sum(map(_size, types))
    return sum(map(_size, types)) + _size(one.result)


def _fused(one: Instruction, types: list[str], program: Program) -> float:
    inner = program.named[_called(one, "calls")]
    total = 0.0
    for name, parameter in inner.items():
        number = number_of(parameter, kind="parameter")
        if number is not None:
            whole = _size(types[number])
            total += min(whole, _read(name, inner, program, whole)) if whole else 0
    root = next(name for name, instruction in inner.items() if instruction.is_root)
    return total + min(_size(one.result), _written(root, inner, program))


def _read(name: str, inner: Computation, program: Program, whole: float) -> float:
    """Bytes of a value of `whole` bytes that its users inside a fusion read."""
    users: dict[str, list[int]] = defaultdict(list)
    for key, one in inner.items():
        for index, operand in enumerate(one.operands):
            if operand == name:
                users[key].append(index)
    total = 0.0
    for key, places in users.items():
        one = inner[key]
        if one.kind in _SLICES or (one.kind == "gather" and places == [0]):
            total += _size(one.result, everywhere=True)
        elif one.kind in _UPDATES and places == [0]:
            continue
        elif one.kind in _SAME or _ALIAS in one.rest:
            total += _read(key, inner, program, whole)
        elif one.kind == "fusion" and len(places) == 1:
            nested = program.named[_called(one, "calls")]
            parameter = next(name for name, it in nested.items() if number_of(it, kind="parameter") == places[0])
            # Where the inner fusion only names the value in another shape, its users stand out here.
            passed = _passed_on(parameter, nested)
            total += _read(key, inner, program, whole) if passed else _read(parameter, nested, program, whole)
        else:
            return whole
    return min(total, whole)


def _passed_on(name: str, inner: Computation) -> bool:
    """Whether a parameter is the result of its computation, in whatever shape."""
    while not inner[name].is_root:
        users = [key for key, one in inner.items() if name in one.operands]
        if len(users) != 1 or inner[users[0]].kind not in _SAME:
            return False
        name = users[0]
    return True


def _written(name: str, inner: Computation, program: Program) -> float:
    """Bytes that a fusion writes for one of its results."""
    one = inner[name]
    if one.kind == "tuple":
        return sum(_written(operand, inner, program) for operand in one.operands)
    if one.kind in ("bitcast", "reshape"):
        return _written(one.operands[0], inner, program)
    if one.kind in _UPDATES:
        return _size(inner[one.operands[_UPDATES[one.kind]]].result, everywhere=True)
    if one.kind == "fusion":
        nested = program.named[_called(one, "calls")]
        return _written(next(key for key, it in nested.items() if it.is_root), nested, program)
    return _size(one.result, everywhere=True)
