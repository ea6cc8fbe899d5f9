"""Reading compiled programs (HLO text): which collectives there are, how big, and inside which loop or branch."""

import math
import re
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_CALLED = re.compile(r"(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OPERATION = re.compile(r"= (.*?) (" + "|".join(KINDS) + r")(?:-start)?\(")
_ARRAY = re.compile(r"\b(?:f|bf|s|u|pred)\w*\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """A collective of a program: kind, elements of each result, its line, and what encloses it."""

    kind: str
    sizes: tuple[int, ...]
    line: str
    in_loop: bool
    in_branch: bool

    @property
    def result(self) -> str:
        """Shapes of the results, as the program writes them."""
        return self.line.split(" = ", 1)[1].split(f" {self.kind}", 1)[0]

    @property
    def size(self) -> int:
        """Elements of the largest result."""
        return max(self.sizes, default=0)


def _computations(text: str) -> dict[str, list[str]]:
    """Name of a computation -> its lines."""
    found: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        header = re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and not line.startswith(" "):
            name = header.group(1)
            found[name] = []
        elif name is not None:
            found[name].append(line)
    return found


def _reachable(starts: set[str], lines: dict[str, list[str]]) -> set[str]:
    """Find the computations that these call, themselves included."""
    reached, waiting = set(), list(starts)
    while waiting:
        name = waiting.pop()
        if name in reached or name not in lines:
            continue
        reached.add(name)
        for line in lines[name]:
            waiting += _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                waiting += [branch.strip().lstrip("%") for branch in branches.split(",")]
    return reached


def collectives(text: str) -> list[Collective]:
    """List every collective of a compiled program.

    Args:
        text: HLO, as `compiled.as_text()` gives it.
    """
    lines = _computations(text)
    loops: set[str] = set()
    branches: set[str] = set()
    for body in lines.values():
        for line in body:
            if " while(" in line:
                loops |= set(re.findall(r"body=%?([\w.\-]+)", line))
            if " conditional(" in line:
                for names in _BRANCHES.findall(line):
                    branches |= {name.strip().lstrip("%") for name in names.split(",")}
                branches |= set(re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line))
    in_loop, in_branch = _reachable(loops, lines), _reachable(branches, lines)
    found = []
    for name, body in lines.items():
        for line in body:
            match = _OPERATION.search(line)
            if match:
                shapes = [math.prod(int(n) for n in dims.split(",") if n) for dims in _ARRAY.findall(match.group(1))]
                found.append(
                    Collective(
                        match.group(2),
                        tuple(shapes),
                        line.strip(),
                        name in in_loop,
                        name in in_branch,
                    )
                )
    return found


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Read `[4,2]T(1,0)`: the numbers 0 .. 7 in that shape, transposed."""
    shape = [int(n) for n in dims.split(",")]
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids if order is None else ids.transpose([int(n) for n in order.split(",")])


def groups(collective: Collective) -> list[set[int]]:
    """Read the groups of devices that take part together, from any of the three forms that XLA writes."""
    line = collective.line
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", line
    )
    if named:
        axes = [(name, int(size)) for name, size in re.findall(r"'(\w+)'=(\d+)", named.group(1))]
        sizes = [size for _, size in axes]
        ids = _iota(named.group(2) or str(math.prod(sizes)), named.group(3)).reshape(sizes)
        used = re.findall(r"'(\w+)'", named.group(4))
        last = [number for number, (name, _) in enumerate(axes) if name in used]
        moved = np.moveaxis(ids, last, range(-len(last), 0))
        return [set(map(int, group)) for group in moved.reshape(-1, math.prod(sizes[number] for number in last))]
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        ids = _iota(iota.group(3), iota.group(4))
        return [set(map(int, group)) for group in ids.reshape(int(iota.group(1)), int(iota.group(2)))]
    explicit = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line)
    assert explicit, f"replica groups in a form that this does not read: {line}"
    return [set(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", explicit.group(1))]


def crosses(collective: Collective, mesh: Mesh, axis: str) -> bool:
    """Whether devices that differ along a mesh axis take part together."""
    # A program numbers the devices of its mesh in the mesh's order.
    where = dict(enumerate(np.ndindex(mesh.devices.shape)))
    number = mesh.axis_names.index(axis)
    if collective.kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", collective.line)
        assert pairs, collective.line
        moves = [tuple(map(int, pair.split(","))) for pair in re.findall(r"(\d+,\d+)", pairs.group(1))]
        return any(where[source][number] != where[target][number] for source, target in moves)
    return any(len({where[member][number] for member in group}) > 1 for group in groups(collective))
