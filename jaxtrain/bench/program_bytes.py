"""How many bytes of its memory a compiled program reads and writes, counted instruction by instruction. No jax here.

XLA's own figure (`cost_analysis()["bytes accessed"]`) is none for a GPU, and for a TPU it counts the body of a loop
once, however often it runs, and every branch of a condition.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f16": 16, "token": 0}
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_DEFINED = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*)$")
_OPERATION = re.compile(r"([\w-]+)\(")
_NAME = re.compile(r"%([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

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
class Instruction:
    """An instruction of a program.

    Attributes:
        type: shapes of its result, as the program writes them.
        operation: such as "fusion".
        operands: names of instructions of the same computation.
        number: of a parameter, or the value of a constant.
        rest: what stands behind the operands.
        is_root: whether it is the result of its computation.
    """

    type: str
    operation: str
    operands: tuple[str, ...]
    number: str
    rest: str
    is_root: bool


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


Computation = dict[str, Instruction]


def moved_bytes(program: str, *, unknown_trips: int = 1) -> list[Moved]:
    """Count what each instruction reads from the memory of a device, and writes to it; the largest come first.

    An operand that is sliced inside the instruction counts with its slice, one that is updated in place with the
    update. What a TPU holds in a core's own memory counts nothing. A condition takes the branch that moves least: in a
    decode step that of greedy rows of whose tokens no alternatives are reported. Caches of a processor are not known.

    Args:
        program: `as_text()` of a compiled program.
        unknown_trips: how often loops run whose number of turns is not in the program.
    """
    computations, entry = _parse(program)
    found: list[Moved] = []
    _count(computations, entry, unknown_trips, 1, found)
    return sorted(found, key=lambda one: -one.bytes)


def _parse(program: str) -> tuple[dict[str, Computation], str]:
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    for line in program.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
            continue
        defined = _DEFINED.match(line)
        if defined:
            current[defined[2]] = _instruction(re.sub(r"/\*.*?\*/", "", defined[3]), bool(defined[1]))
    return computations, entry


def _instruction(text: str, is_root: bool) -> Instruction:
    if text.startswith("("):
        end = _closing(text, 0) + 1
    else:
        end = text.index(" ")
    operation = _OPERATION.match(text, end + 1)
    assert operation is not None, f"no operation in {text[:200]}"
    last = _closing(text, operation.end() - 1)
    inside = text[operation.end() : last]
    return Instruction(text[:end], operation[1], tuple(_NAME.findall(inside)), inside, text[last + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    raise AssertionError(f"no end of {text[start : start + 200]}")


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
    assert found is not None, f"{instruction.operation} without {key}"
    return found[1]


def _count(computations: dict[str, Computation], name: str, unknown_trips: int, runs: int, found: list[Moved]) -> float:
    """Bytes of one run of a computation; appends its instructions, each with all `runs` of it."""
    computation, total = computations[name], 0.0
    for key, one in computation.items():
        types = [computation[operand].type for operand in one.operands if operand in computation]
        if one.operation in _FREE or one.operation.endswith("-done"):
            continue
        if one.operation == "while":
            trips = _trips(one, computations, unknown_trips)
            total += trips * _count(computations, _called(one, "body"), unknown_trips, runs * trips, found)
        elif one.operation == "conditional":
            branches = [
                (_count(computations, branch, unknown_trips, runs, listed), listed)
                for branch in _branches(one)
                for listed in [[]]
            ]
            least, listed = min(branches, key=lambda branch: branch[0])
            found += listed
            total += least
        elif one.operation in ("call", "async-start"):
            inner = _called(one, "to_apply" if one.operation == "call" else "calls")
            total += _count(computations, inner, unknown_trips, runs, found)
        else:
            moved = _moved(one, types, computation, computations)
            total += moved
            if moved:
                found.append(Moved(key, moved * runs, runs, one.type))
    return total


def _trips(loop: Instruction, computations: dict[str, Computation], unknown: int) -> int:
    known = _TRIPS.search(loop.rest)
    if known:
        return int(known[1])
    # A TPU's program does not say it; its counters begin at 0 and are compared with a constant.
    condition = computations[_called(loop, "condition")]
    limits = [one.number for one in condition.values() if one.operation == "constant" and one.number.isdigit()]
    return int(limits[0]) if len(limits) == 1 else unknown


def _branches(condition: Instruction) -> list[str]:
    several = re.search(r"branch_computations=\{([^}]*)\}", condition.rest)
    if several:
        return _NAME.findall(several[1])
    return [_called(condition, f"{which}_computation") for which in ("true", "false")]


def _moved(one: Instruction, types: list[str], computation: Computation, computations: dict[str, Computation]) -> float:
    """Bytes that one run of an instruction reads and writes."""
    result = _size(one.type, everywhere=True)
    if one.operation == "fusion":
        return _fused(one, types, computations)
    if one.operation in (*_SLICES, "gather"):
        return (_size(types[0]) > 0) * result + _size(one.type)
    if one.operation in _UPDATES:
        return 2 * _size(computation[one.operands[_UPDATES[one.operation]]].type, everywhere=True)
    if one.operation in ("copy-start", "slice-start"):
        # The type lists what is read too: (target, source, context), or ((source), target, context).
        target = _ARRAY.findall(one.type)[0 if one.operation == "copy-start" else 1]
        written = f"{target[0]}[{target[1]}]{{{target[2]}}}"
        return (_size(types[0]) > 0) * _size(written, everywhere=True) + _size(written)
    if one.operation.endswith("-start"):
        return 2 * sum(map(_size, types))
    return sum(map(_size, types)) + _size(one.type)


def _fused(one: Instruction, types: list[str], computations: dict[str, Computation]) -> float:
    inner = computations[_called(one, "calls")]
    total = 0.0
    for name, parameter in inner.items():
        if parameter.operation == "parameter":
            whole = _size(types[int(parameter.number)])
            total += min(whole, _read(name, inner, computations, whole)) if whole else 0
    root = next(name for name, instruction in inner.items() if instruction.is_root)
    return total + min(_size(one.type), _written(root, inner, computations))


def _read(name: str, inner: Computation, computations: dict[str, Computation], whole: float) -> float:
    """Bytes of a value of `whole` bytes that its users inside a fusion read."""
    users: dict[str, list[int]] = defaultdict(list)
    for key, one in inner.items():
        for index, operand in enumerate(one.operands):
            if operand == name:
                users[key].append(index)
    total = 0.0
    for key, places in users.items():
        one = inner[key]
        if one.operation in _SLICES or (one.operation == "gather" and places == [0]):
            total += _size(one.type, everywhere=True)
        elif one.operation in _UPDATES and places == [0]:
            continue
        elif one.operation in _SAME or _ALIAS in one.rest:
            total += _read(key, inner, computations, whole)
        elif one.operation == "fusion" and len(places) == 1:
            nested = computations[_called(one, "calls")]
            parameter = next(
                name for name, it in nested.items() if it.operation == "parameter" and int(it.number) == places[0]
            )
            # Where the inner fusion only names the value in another shape, its users stand out here.
            passed = _passed_on(parameter, nested)
            total += _read(key, inner, computations, whole) if passed else _read(parameter, nested, computations, whole)
        else:
            return whole
    return min(total, whole)


def _passed_on(name: str, inner: Computation) -> bool:
    """Whether a parameter is the result of its computation, in whatever shape."""
    while not inner[name].is_root:
        users = [key for key, one in inner.items() if name in one.operands]
        if len(users) != 1 or inner[users[0]].operation not in _SAME:
            return False
        name = users[0]
    return True


def _written(name: str, inner: Computation, computations: dict[str, Computation]) -> float:
    """Bytes that a fusion writes for one of its results."""
    one = inner[name]
    if one.operation == "tuple":
        return sum(_written(operand, inner, computations) for operand in one.operands)
    if one.operation in ("bitcast", "reshape"):
        return _written(one.operands[0], inner, computations)
    if one.operation in _UPDATES:
        return _size(inner[one.operands[_UPDATES[one.operation]]].type, everywhere=True)
    if one.operation == "fusion":
        nested = computations[_called(one, "calls")]
        return _written(next(key for key, it in nested.items() if it.is_root), nested, computations)
    return _size(one.type, everywhere=True)
