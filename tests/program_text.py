"""Compiled programs (HLO text) as computations, each a list of instructions. No jax here."""

import math
import re
from dataclasses import dataclass
from functools import cached_property

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\w*\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# Their computation is applied to elements; it is no part of the schedule.
_APPLIED = ("reduce", "all-reduce", "all-reduce-start", "reduce-scatter", "reduce-window", "sort", "scatter", "map")


@dataclass(frozen=True)
class Instruction:
    """An instruction of a computation.

    Attributes:
        name: Its name.
        result: Type of its result, a tuple in parentheses.
        kind: Its opcode.
        rest: What follows the opcode's parenthesis: operands and attributes.
        is_root: Whether it is the result of its computation.
    """

    name: str
    result: str
    kind: str
    rest: str
    is_root: bool

    @cached_property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.split(")", 1)[0])

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs: bodies, branches, fused ones."""
        if self.kind in _APPLIED:
            return []
        branches = [one.strip().lstrip("%") for names in _BRANCHES.findall(self.rest) for one in names.split(",")]
        return [*_CALLED.findall(self.rest), *branches]


@dataclass(frozen=True)
class Program:
    """The computations of a program by name, and the name of the one that it begins with."""

    computations: dict[str, list[Instruction]]
    entry: str

    @cached_property
    def named(self) -> dict[str, dict[str, Instruction]]:
        """The instructions of each computation by name, in their order."""
        return {name: {one.name: one for one in body} for name, body in self.computations.items()}

    def turns(self, one: Instruction, body: list[Instruction], *, unknown: int = 1) -> int:
        """How often a loop turns; 1 for what is no loop.

        Args:
            one: The instruction.
            body: The computation that it stands in.
            unknown: For loops of which the program does not say it.
        """
        if one.kind != "while":
            return 1
        if known := _TURNS.search(one.rest):
            return int(known.group(1))
        # TPUs write the bound in the condition alone: a number of the loop's state is less than a constant.
        condition = re.search(r"condition=%?([\w.\-]+)", one.rest)
        inside = self.named.get(condition.group(1) if condition else "", {})
        compared = [each for each in inside.values() if each.kind == "compare" and "direction=LT" in each.rest]
        if len(compared) != 1:
            return unknown
        counter, bound = (inside.get(name) for name in compared[0].operands)
        if counter is None or bound is None or number_of(bound) is None:
            return unknown
        place = re.search(r"index=(\d+)", counter.rest)
        beside = {each.name: each for each in body}
        state = beside.get(one.operands[0])
        first = beside.get(state.operands[int(place.group(1))]) if place and state and state.kind == "tuple" else None
        return (number_of(bound) or 0) - ((number_of(first) or 0) if first else 0)


def read_program(text: str) -> Program:
    """Read a program.

    Args:
        text: Optimized HLO, as `compiled.as_text()` gives it.
    """
    computations: dict[str, list[Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            name = header.group(2)
            computations[name] = []
            entry = name if header.group(1) else entry
        elif name and (match := _INSTRUCTION.match(line)):
            root, *parts = match.groups()
            computations[name].append(Instruction(*parts, is_root=root is not None))
    return Program(computations, entry)


def number_of(one: Instruction, *, kind: str = "constant") -> int | None:
    """The number in the parentheses of an integer constant, or of a parameter; None for other kinds."""
    found = re.match(r"(-?\d+)\)", one.rest) if one.kind == kind else None
    return int(found.group(1)) if found else None


def arrays(result: str) -> list[tuple[int, list[int]]]:
    """(bits of an element, dims) of each array of a type."""
    return [
        (8 if name == "pred" else int(re.sub(r"\D", "", name)), [int(n) for n in dims.split(",") if n])
        for name, dims in _ARRAY.findall(result)
    ]


def array_bytes(result: str) -> int:
    """Bytes of all arrays of a type."""
    return sum(bits * math.prod(dims) // 8 for bits, dims in arrays(result))
