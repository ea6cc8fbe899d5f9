"""Exchanges of a compiled program (HLO text) that nothing orders: see `jaxtrain/layout/order.py`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxtrain.parallel.programs import KINDS

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_GROUPS = re.compile(r"replica_groups=(\{\{[\d,{}]*\}\}|\[[^=]*?\](?:<=\S*)?|mesh\S*|\{\})")
_CONTROL = ("while", "conditional", "call")


class Key(NamedTuple):
    """What XLA's CPU backend tells exchanges apart by: a permutation takes every device, whatever its pairs are."""

    kind: str
    channel: str
    groups: str


@dataclass(frozen=True)
class _Operation:
    opcode: str
    reads: tuple[str, ...]
    calls: tuple[str, ...]
    key: Key | None


def unordered(text: str) -> list[tuple[str, str]]:
    """Pairs of operations with exchanges of one key, a loop or branch at least one of them, that may run at once.

    Two plain exchanges are started in the order of the program, and block.
    """
    computations = _computations(text)
    found = list[tuple[str, str]]()
    for operations in computations.values():
        keys = {name: _keys(operation, computations) for name, operation in operations.items()}
        before = dict[str, frozenset[str]]()
        exchanging = list[str]()
        for name, operation in operations.items():  # operands come first
            known = [one for one in operation.reads if one in before]
            before[name] = frozenset().union(*(before[one] for one in known), (one for one in known if keys[one]))
            if not keys[name]:
                continue
            for other in exchanging:
                controls = {operation.opcode, operations[other].opcode} & set(_CONTROL)
                if controls and keys[name] & keys[other] and other not in before[name]:
                    found.append((other, name))
            exchanging.append(name)
    return found


def _keys(operation: _Operation, computations: dict[str, dict[str, _Operation]]) -> frozenset[Key]:
    """Keys of the exchanges that an operation is, or runs."""
    own = frozenset([operation.key] if operation.key else [])
    if operation.opcode not in _CONTROL:
        return own
    inner = (one for name in operation.calls for one in computations.get(name, {}).values())
    return own.union(*(_keys(one, computations) for one in inner))


def _computations(text: str) -> dict[str, dict[str, _Operation]]:
    """Name of a computation -> name of an operation -> the operation, in the order of the text."""
    found = dict[str, dict[str, _Operation]]()
    name = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header.group(1)
            found[name] = {}
        elif operation := _OPERATION.match(line):
            found[name][operation.group(1)] = _read(operation.group(2), operation.group(3))
    return found


def _read(opcode: str, rest: str) -> _Operation:
    operands, attributes = rest[: (end := _end(rest))], rest[end:]
    calls = [*_CALLED.findall(attributes), *(one for group in _BRANCHES.findall(attributes) for one in _names(group))]
    kind = opcode.removesuffix("-start")
    key = None
    if kind in KINDS:
        channel, groups = re.search(r"channel_id=(\d+)", attributes), _GROUPS.search(attributes)
        is_permuted = kind == "collective-permute"
        key = Key(kind, channel.group(1) if channel else "", "" if is_permuted or not groups else groups.group(1))
    return _Operation(opcode, tuple(re.findall(r"%([\w.\-]+)", operands)), tuple(calls), key)


def _names(group: str) -> Iterator[str]:
    return (name.strip().lstrip("%") for name in group.split(","))


def _end(text: str) -> int:
    """Where the bracket that was opened before the text is closed."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    return len(text)
