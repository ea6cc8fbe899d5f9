"""Pipeline schedules as data: which stage does the forward and the backward of which microbatch in which tick.

No jax here: the runner, the planner and the pictures read the very same table.

The pipeline moves in lock step. In a tick every stage stores what arrives, then does at most one forward, then at
most one backward; between ticks activations go one stage up and gradients one stage down, round a ring. With v chunks
of layers a stage, layers are dealt to p * v virtual stages in order, and virtual stage k = chunk * p + stage. What
virtual stage k sends in tick t arrives at k + 1 (an activation) or k - 1 (a gradient) at the start of tick t + 1.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxtrain.errors import ConfigError

Cell = tuple[int, int] | None
"""(microbatch, chunk), or None where a stage idles."""

Table = tuple[tuple[Cell, ...], ...]
"""[tick][stage] -> Cell."""


class Placed(NamedTuple):
    """When one microbatch passes one chunk of one stage."""

    stage: int
    chunk: int
    microbatch: int
    forward_tick: int
    backward_tick: int


@dataclass(frozen=True)
class Tables:
    """A schedule as the runner reads it: int32 arrays [ticks, stages], -1 where there is nothing to do.

    Slots number the places of a stage's buffers. A slot is taken from the tick of the arrival to the tick of the
    backward that reads it, both included. Virtual stage 0 reads tokens and the last one makes its own gradient from
    the loss: neither takes a slot for them. The numbers of slots are those of the stage that needs most, because all
    stages run one program; they are 0 where nothing arrives (one virtual stage in all).
    """

    forward_microbatch: np.ndarray
    forward_chunk: np.ndarray
    forward_slot: np.ndarray
    """Slot with the input of this tick's forward."""
    receive_slot: np.ndarray
    """Slot in which to store the activation that arrives at the start of this tick."""
    backward_microbatch: np.ndarray
    backward_chunk: np.ndarray
    backward_slot: np.ndarray
    """Slot with the input saved for this tick's backward."""
    receive_gradient_slot: np.ndarray
    """Slot in which to store the gradient that arrives at the start of this tick."""
    backward_gradient_slot: np.ndarray
    """Slot with the gradient of the output that this tick's backward starts from."""
    num_slots: int
    num_gradient_slots: int


ARRAYS = tuple(name for name, kind in Tables.__annotations__.items() if kind is np.ndarray)


@dataclass(frozen=True)
class Schedule:
    """A table tick x stage. Each tick a stage does at most one forward and then at most one backward."""

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    """Chunks of layers a stage; 1 unless interleaved."""
    forward: Table
    backward: Table

    @property
    def num_ticks(self) -> int:
        """Ticks of one optimizer step."""
        return len(self.forward)

    def bubble_fraction(self, forward_cost: float = 1.0, backward_cost: float = 2.0) -> float:
        """The share of all stages' time that they idle, counted from the table.

        Args:
            forward_cost: time of the forward of one microbatch through one chunk.
            backward_cost: time of its backward, recomputing included.
        """
        costs = [
            [forward_cost * (f is not None) + backward_cost * (b is not None) for f, b in zip(*row, strict=True)]
            for row in zip(self.forward, self.backward, strict=True)
        ]
        # A tick takes as long as the stage that does most in it.
        total = self.num_stages * sum(map(max, costs))
        return (total - sum(map(sum, costs))) / total

    def peak_live(self, stage: int | None = None) -> int:
        """The most microbatch inputs that a stage (None: any) holds at once, counted from the table.

        An input lives from its forward to its backward, both included. The tokens of virtual stage 0 count, although
        they take no slot in `tables`. With chunks, an input of one chunk counts as one.
        """
        return max(self._live) if stage is None else self._live[stage]

    @functools.cached_property
    def _live(self) -> tuple[int, ...]:
        """`peak_live` of each stage."""
        lives: list[list[tuple[int, int]]] = [[] for _ in range(self.num_stages)]
        for one in _placed(self):
            lives[one.stage].append((one.forward_tick, one.backward_tick))
        return tuple(map(_overlap, lives))

    def tables(self) -> Tables:
        """The arrays of the runner, with a slot assigned to every activation and gradient that arrives."""
        return _assign(self)


# A search asks for the same few again and again.
@functools.lru_cache(maxsize=64)
def make_schedule(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Lays out a schedule.

    Args:
        name: a row of `SCHEDULES`.
        num_stages: p, the degree of the `pipe` axis.
        num_microbatches: m, microbatches of one optimizer step; a multiple of p if the schedule is interleaved.
        num_chunks: v, chunks of layers a stage; 1 unless the schedule is interleaved.

    Raises:
        ConfigError: chunks that the schedule does not have.
    """
    interleaved = name == "interleaved_1f1b"
    if interleaved != (num_chunks > 1):
        chunks = "2 or more" if interleaved else "1"
        raise ConfigError(f"parallel.schedule={name} has parallel.chunks of {chunks}, not {num_chunks}")
    placed = list(SCHEDULES[name](num_stages, num_microbatches, num_chunks))
    num_ticks = 1 + max(p.backward_tick for p in placed)
    forward: list[list[Cell]] = [[None] * num_stages for _ in range(num_ticks)]
    backward: list[list[Cell]] = [[None] * num_stages for _ in range(num_ticks)]
    for stage, chunk, microbatch, forward_tick, backward_tick in placed:
        forward[forward_tick][stage] = (microbatch, chunk)
        backward[backward_tick][stage] = (microbatch, chunk)
    return Schedule(
        name, num_stages, num_microbatches, num_chunks, tuple(map(tuple, forward)), tuple(map(tuple, backward))
    )


def _gpipe(p: int, m: int, v: int) -> Iterator[Placed]:
    """All forwards, then all backwards: bubble (p-1)/(m+p-1), m inputs live (Huang et al. 2019, arXiv:1811.06965).

    The last stage starts the backwards in the tick of its last forward, which saves a tick and changes nothing else.
    """
    for s in range(p):
        for i in range(m):
            yield Placed(s, 0, i, forward_tick=i + s, backward_tick=(m + p - 2) + (p - 1 - s) + i)


def _one_forward_one_backward(p: int, m: int, v: int) -> Iterator[Placed]:
    """Backward as soon as it can be: bubble (p-1)/(m+p-1), at most 2(p-1-s)+1 inputs live on stage s.

    The order of PipeDream-Flush (Narayanan et al. 2021, arXiv:2006.09503). There p - s inputs are live; in lock step
    a microbatch takes a whole tick, forward and backward, to pass a stage, so that nearly twice as many are.
    """
    for s in range(p):
        for i in range(m):
            yield Placed(s, 0, i, forward_tick=i + s, backward_tick=i + 2 * (p - 1) - s)


def _interleaved(p: int, m: int, v: int) -> Iterator[Placed]:
    """1F1B over p * v virtual stages: bubble (p-1)/(vm+p-1), at most (v+1)p-1-2s chunk inputs live on stage s.

    The order of Narayanan et al. 2021, arXiv:2104.04473, section 2.2: groups of p microbatches pass one chunk after
    the other, so that each arrives back at stage 0 just when it is due there.
    """
    for s in range(p):
        for c in range(v):
            for i in range(m):
                group, j = divmod(i, p)
                start = group * p * v + j
                forward_tick = start + c * p + s
                backward_tick = (v * p - 1) + start + (v - 1 - c) * p + (p - 1 - s)
                yield Placed(s, c, i, forward_tick, backward_tick)


# Each row yields every (stage, chunk, microbatch) once with its two ticks. A zero-bubble schedule is no row: it fills
# the bubble with gradients of weights, but the runner recomputes a stage in one vjp, which gives the gradients of
# inputs and weights together; taken apart, the recomputing would have to be done twice.
SCHEDULES: dict[str, Callable[[int, int, int], Iterator[Placed]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _interleaved,
}


def _ticks(table: Table) -> dict[tuple[int, int], int]:
    """(microbatch, virtual stage) -> tick."""
    return {
        (cell[0], cell[1] * len(row) + stage): tick
        for tick, row in enumerate(table)
        for stage, cell in enumerate(row)
        if cell is not None
    }


def _placed(schedule: Schedule) -> list[Placed]:
    """The operations of a schedule, read back from its table."""
    p, backward = schedule.num_stages, _ticks(schedule.backward)
    forward = _ticks(schedule.forward).items()
    return [Placed(k % p, k // p, i, tick, backward[i, k]) for (i, k), tick in forward]


def _overlap(intervals: Iterable[tuple[int, int]]) -> int:
    """The most intervals of ticks, ends included, that share a tick; 0 of none."""
    change: Counter[int] = Counter()
    for first, last in intervals:
        change[first] += 1
        change[last + 1] -= 1
    live = peak = 0
    for tick in sorted(change):
        live += change[tick]
        peak = max(peak, live)
    return peak


def _assign(schedule: Schedule) -> Tables:
    """Fills the runner's arrays; an arrival takes the lowest free slot, which needs no more slots than overlap."""
    p = schedule.num_stages
    last_virtual = p * schedule.num_chunks - 1
    shape = (schedule.num_ticks, p)
    arrays = {name: np.full(shape, -1, np.int32) for name in ARRAYS}
    placed = {(one.microbatch, one.chunk * p + one.stage): one for one in _placed(schedule)}
    inputs: list[tuple[int, int, Placed]] = []
    gradients: list[tuple[int, int, Placed]] = []
    for (i, k), one in placed.items():
        arrays["forward_microbatch"][one.forward_tick, one.stage] = i
        arrays["forward_chunk"][one.forward_tick, one.stage] = one.chunk
        arrays["backward_microbatch"][one.backward_tick, one.stage] = i
        arrays["backward_chunk"][one.backward_tick, one.stage] = one.chunk
        if k > 0:
            inputs.append((placed[i, k - 1].forward_tick + 1, one.backward_tick, one))
        if k < last_virtual:
            gradients.append((placed[i, k + 1].backward_tick + 1, one.backward_tick, one))

    input_slots, num_slots = _color(inputs)
    for (arrival, _, one), slot in input_slots:
        arrays["receive_slot"][arrival, one.stage] = slot
        arrays["forward_slot"][one.forward_tick, one.stage] = slot
        arrays["backward_slot"][one.backward_tick, one.stage] = slot
    gradient_slots, num_gradient_slots = _color(gradients)
    for (arrival, _, one), slot in gradient_slots:
        arrays["receive_gradient_slot"][arrival, one.stage] = slot
        arrays["backward_gradient_slot"][one.backward_tick, one.stage] = slot
    return Tables(**arrays, num_slots=num_slots, num_gradient_slots=num_gradient_slots)


def _color(
    intervals: list[tuple[int, int, Placed]],
) -> tuple[list[tuple[tuple[int, int, Placed], int]], int]:
    """Interval colouring, each stage by itself: (first tick, last tick, operation) -> slot, and the most slots."""
    taken_until: dict[int, list[int]] = {}
    result = []
    for interval in sorted(intervals, key=lambda interval: interval[0]):
        first, last, one = interval
        slots = taken_until.setdefault(one.stage, [])
        slot = next((index for index, until in enumerate(slots) if until < first), len(slots))
        slots[slot : slot + 1] = [last]
        result.append((interval, slot))
    return result, max(map(len, taken_until.values()), default=0)
