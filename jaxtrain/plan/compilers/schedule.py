"""Reading scheduled programs: what each collective sends, and the matmuls between its start and its end. No jax here.

A scheduled program lists the instructions of a computation in the order in which a device starts them. A collective in
two halves (`all-gather-start`, `all-gather-done`) runs beside what stands between them. TPUs also put the steps of a
collective into the fusion of a matmul; such a chain begins with `AsyncCollectiveStart` and ends with
`AsyncCollectiveDone`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxtrain.plan.compilers.matmuls import MatmulCounter, Matmuls
from jaxtrain.plan.compilers.program_text import Instruction, array_bytes, read_program

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Transfer:
    """A collective of a scheduled program, on one device.

    Attributes:
        kind: Kind of the collective, one of `KINDS`.
        bytes: Bytes of one turn: of the whole array that is gathered, scattered or exchanged. An all-reduce counts
            twice, because it is a reduce-scatter and an all-gather.
        turns: How often it runs in a step: the product of the turns of the loops around it. Branches count as taken.
        beside: The matmuls between its start and its end, in one turn.
        name: What the program calls it, as in `jit(_step)/jvp()/while/body/...`.
    """

    kind: str
    bytes: int
    turns: int
    beside: Matmuls
    name: str

    @property
    def step_bytes(self) -> int:
        """Bytes of a step."""
        return self.bytes * self.turns


def transfers(text: str) -> list[Transfer]:
    """List the collectives of a scheduled program, in its order.

    Args:
        text: Optimized HLO whose first line has `is_scheduled=true`; of GPUs it is what `compiled.as_text()` gives.

    Raises:
        ValueError: The program is not scheduled.
    """
    program = read_program(text)
    if not program.is_scheduled:
        raise ValueError("the program is not scheduled: give optimized HLO, whose first line has is_scheduled=true")
    return list(_walk(MatmulCounter(program), program.entry, 1))


def overlapped_share(found: Sequence[Transfer]) -> float:
    """Returns the share of the bytes of a step that are sent beside matmuls; 1 where nothing is sent."""
    total = sum(one.step_bytes for one in found)
    return sum(one.step_bytes for one in found if one.beside.number) / total if total else 1.0


def _walk(counter: MatmulCounter, name: str, turns: int) -> Iterator[Transfer]:
    """Give the collectives of a computation, and of the loops, branches and calls in it."""
    body = counter.program.computations.get(name, [])
    results = {one.name: one.result for one in body}
    for position, one in enumerate(body):
        if one.kind in ("while", "conditional", "call"):
            for called in one.called:
                yield from _walk(counter, called, turns * counter.program.turns(one, body))
            continue
        kind = one.kind.removesuffix("-start")
        if kind in KINDS:
            end = position if kind == one.kind else _end_of_halves(body, position)
            beside = counter.count(body[position + 1 : end], body)
            yield _transfer(kind, one, body[end].result, results, turns, beside)
        elif one.kind in ("fusion", "async-start", "custom-call"):
            yield from _fused(counter, body, position, turns)


def _fused(counter: MatmulCounter, body: list[Instruction], position: int, turns: int) -> Iterator[Transfer]:
    """Give the collectives that a fusion or an asynchronous call begins; the later steps of a chain are left out."""
    one = body[position]
    parts = [part for called in one.called for part in counter.program.flattened(called)]
    starts, ends = (any(mark in part.rest for part, _ in parts) for mark in _MARKS)
    for inner, results in parts:
        if inner.kind not in KINDS:
            continue
        if one.kind == "async-start":
            end = _end_of_halves(body, position)
        elif starts:
            end = _end_of_chain(counter, body, position, inner)
        elif ends or any(name.startswith("async_collective_fusion") for name in one.called):
            continue
        else:
            end = position
        # A TPU's reduce-scatter is a fusion of an all-reduce and a slice.
        scattered = inner.kind == "all-reduce" and any("all-reduce-scatter" in name for name in one.called)
        beside = counter.count(body[position + 1 : end + 1], body)
        yield _transfer("reduce-scatter" if scattered else inner.kind, inner, inner.result, results, turns, beside)


_MARKS = ("AsyncCollectiveStart", "AsyncCollectiveDone")


def _transfer(
    kind: str, one: Instruction, result: str, results: dict[str, str], turns: int, beside: Matmuls
) -> Transfer:
    given = sum(array_bytes(results.get(operand, "")) for operand in one.operands)
    whole = array_bytes(result) if kind == "all-gather" else given * (2 if kind == "all-reduce" else 1)
    name = _NAME.search(one.rest)
    return Transfer(kind, whole, turns, beside, name.group(1) if name else "")


def _end_of_halves(body: list[Instruction], position: int) -> int:
    """Find the second half of an asynchronous instruction; updates may stand between."""
    names = {body[position].name}
    for later in range(position + 1, len(body)):
        one = body[later]
        if one.kind.endswith(("-done", "-update")) and names & set(one.operands):
            if one.kind.endswith("-done"):
                return later
            names.add(one.name)
    return position


def _end_of_chain(counter: MatmulCounter, body: list[Instruction], position: int, inner: Instruction) -> int:
    """Find the fusion that ends a collective which a fusion began: it names the same channel."""
    channel = _CHANNEL.search(inner.rest)
    for later in range(position + 1, len(body)):
        if channel is None or body[later].kind != "fusion":
            continue
        rests = [part.rest for called in body[later].called for part, _ in counter.program.flattened(called)]
        if any(_MARKS[1] in rest for rest in rests) and channel.group(0) in {
            match.group(0) for rest in rests for match in _CHANNEL.finditer(rest)
        }:
            return later
    return position
