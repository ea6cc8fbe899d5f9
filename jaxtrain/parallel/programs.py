"""Reading compiled programs (HLO text): which collectives there are, how big, and inside which loop or branch."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"\b(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"\b(?:f|bf|s|u|pred)\w*\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    """An instruction: its name, the type of its result, its opcode, and what follows the opcode's parenthesis."""

    name: str
    result: str
    kind: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.split(")", 1)[0])

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs or applies: bodies, branches, fused ones."""
        branches = [one.strip().lstrip("%") for names in _BRANCHES.findall(self.rest) for one in names.split(",")]
        return [*_CALLED.findall(self.rest), *branches]


@dataclass(frozen=True)
class Program:
    """The instructions of each computation by name, in their order, and the computation that it begins with."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def reached(self, starts: Iterable[str]) -> set[str]:
        """The computations that these call, themselves included."""
        found, waiting = set[str](), list(starts)
        while waiting:
            name = waiting.pop()
            if name not in found and name in self.computations:
                found.add(name)
                waiting += [called for one in self.computations[name].values() for called in one.called]
        return found


@dataclass(frozen=True)
class Collective:
    """A collective of a program: kind, elements of each result, its type and attributes, and what encloses it."""

    kind: str
    sizes: tuple[int, ...]
    result: str
    line: str
    in_loop: bool
    in_branch: bool

    @property
    def size(self) -> int:
        """Elements of the largest result."""
        return max(self.sizes, default=0)


def read_program(text: str) -> Program:
    """Read HLO text, as `compiled.as_text()` gives it."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header.group(2)
            computations[name] = {}
            entry = name if header.group(1) else entry
        elif name and (match := _INSTRUCTION.match(line)):
            computations[name][match.group(1)] = Instruction(*match.groups())
    return Program(computations, entry)


def collectives(text: str) -> list[Collective]:
    """List every collective of a compiled program (HLO text)."""
    program = read_program(text)
    every = [(name, one) for name, body in program.computations.items() for one in body.values()]
    in_loop, in_branch = (
        program.reached(called for _, one in every if one.kind == kind for called in one.called)
        for kind in ("while", "conditional")
    )
    found = []
    for name, one in every:
        kind = one.kind.removesuffix("-start")
        if kind in KINDS:
            sizes = tuple(math.prod(int(n) for n in dims.split(",") if n) for dims in _ARRAY.findall(one.result))
            line = f"{one.name} = {one.result} {one.kind}({one.rest}"
            found.append(Collective(kind, sizes, one.result, line, name in in_loop, name in in_branch))
    return found
