"""What compiled programs (HLO text) do: who takes part in a collective, what a step sends, what nothing orders."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxtrain.parallel.programs import KINDS, Collective, Instruction, Program, read_program

_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\w*\[([\d,]*)\]")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_GROUPS = re.compile(r"replica_groups=(\{\{[\d,{}]*\}\}|\[[^=]*?\](?:<=\S*)?|mesh\S*|\{\})")
_CONTROL = ("while", "conditional", "call")


def arrays(result: str) -> list[tuple[int, list[int]]]:
    """(bits of an element, dims) of each array of a type."""
    return [
        (8 if name == "pred" else int(re.sub(r"\D", "", name)), [int(n) for n in dims.split(",") if n])
        for name, dims in _ARRAY.findall(result)
    ]


def array_bytes(result: str) -> int:
    """Bytes of all arrays of a type."""
    return sum(bits * math.prod(dims) // 8 for bits, dims in arrays(result))


def walk(program: Program, name: str | None = None, turns: int = 1) -> Iterator[tuple[Instruction, dict, int]]:
    """Every instruction that runs, those beside it by name, and how often it runs: loops turn, branches are taken."""
    beside = program.computations[name or program.entry]
    for one in beside.values():
        known = _TURNS.search(one.rest)
        yield one, beside, turns
        if one.kind in (*_CONTROL, "fusion"):
            for called in one.called:
                yield from walk(program, called, turns * (int(known.group(1)) if known else 1))


class Transfer(NamedTuple):
    """A collective: its kind, and the bytes of whole arrays that it gathers, scatters or exchanges in a step."""

    kind: str
    step_bytes: int


def transfers(text: str) -> list[Transfer]:
    """The collectives of an optimized program of CPU devices, of which none is in two halves.

    An all-reduce counts twice, because it is a reduce-scatter and an all-gather.
    """
    found = []
    for one, beside, turns in walk(read_program(text)):
        if one.kind in KINDS:
            given = sum(array_bytes(beside[operand].result) for operand in one.operands)
            whole = array_bytes(one.result) if one.kind == "all-gather" else given * (1 + (one.kind == "all-reduce"))
            found.append(Transfer(one.kind, turns * whole))
    return found


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Read `[4,2]T(1,0)`: the numbers 0 .. 7 in that shape, transposed."""
    shape = [int(n) for n in dims.split(",")]
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids if order is None else ids.transpose([int(n) for n in order.split(",")])


def groups(line: str) -> list[set[int]]:
    """Read the groups of devices that take part together, from any of the three forms that XLA writes."""
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
    return any(len({where[member][number] for member in group}) > 1 for group in groups(collective.line))


def unordered(text: str) -> list[tuple[str, str]]:
    """Pairs of operations with exchanges of one key, a loop or branch at least one of them, that may run at once.

    Two plain exchanges are started in the order of the program, and block; see `jaxtrain/layout/manual.py`.
    """
    program = read_program(text)
    found = list[tuple[str, str]]()
    for body in program.computations.values():
        keys = {name: _keys(one, program) for name, one in body.items()}
        before = dict[str, frozenset[str]]()
        exchanging = list[str]()
        for name, one in body.items():  # operands come first
            known = [operand for operand in one.operands if operand in before]
            before[name] = frozenset().union(*(before[each] for each in known), (each for each in known if keys[each]))
            for other in exchanging if keys[name] else ():
                controls = {one.kind, body[other].kind} & set(_CONTROL)
                if controls and keys[name] & keys[other] and other not in before[name]:
                    found.append((other, name))
            exchanging += [name] if keys[name] else []
    return found


def _keys(one: Instruction, program: Program) -> frozenset[tuple[str, str, str]]:
    """Keys of the exchanges that an operation is, or runs: what XLA's CPU backend tells exchanges apart by.

    A permutation takes every device, whatever its pairs are.
    """
    kind = one.kind.removesuffix("-start")
    if kind in KINDS:
        channel, members = re.search(r"channel_id=(\d+)", one.rest), _GROUPS.search(one.rest)
        is_permuted = kind == "collective-permute"
        return frozenset(
            [(kind, channel.group(1) if channel else "", "" if is_permuted or not members else members.group(1))]
        )
    called = program.reached(one.called) if one.kind in _CONTROL else ()
    inner = (each for name in called for each in program.computations[name].values() if each.kind not in _CONTROL)
    return frozenset().union(*(_keys(each, program) for each in inner))
