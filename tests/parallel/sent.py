"""What a compiled program (HLO text) sends in a step, loops counted as often as they turn."""

from collections.abc import Iterator
from typing import NamedTuple

from program_text import Program, array_bytes, read_program

from jaxtrain.parallel.programs import KINDS


class Transfer(NamedTuple):
    """A collective: its kind, and the bytes of whole arrays that it gathers, scatters or exchanges in a step."""

    kind: str
    step_bytes: int


def transfers(text: str) -> list[Transfer]:
    """The collectives of an optimized program of CPU devices, of which none is in two halves.

    An all-reduce counts twice, because it is a reduce-scatter and an all-gather; branches count as taken.
    """
    program = read_program(text)
    return list(_walk(program, program.entry, 1))


def _walk(program: Program, name: str, turns: int) -> Iterator[Transfer]:
    beside = program.named[name]
    body = list(beside.values())
    for one in body:
        for called in one.called:
            yield from _walk(program, called, turns * program.turns(one, body))
        if one.kind in KINDS:
            given = sum(array_bytes(beside[operand].result) for operand in one.operands)
            whole = array_bytes(one.result) if one.kind == "all-gather" else given * (1 + (one.kind == "all-reduce"))
            yield Transfer(one.kind, turns * whole)
