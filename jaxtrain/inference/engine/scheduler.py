"""What the engine does next: which request gets which row of the cache, which prompt is read, when all get a token.

The engine's thread alone calls it; other threads append to the requests that wait.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxtrain.inference.engine.programs import Chosen, Programs
from jaxtrain.inference.engine.request import Emitted, EngineCounters, Request, Ticket
from jaxtrain.inference.sampling import RowSampling, Sampling, bias_rows, row_sampling
from jaxtrain.models.model import NOWHERE

# A shorter common beginning, such as the token that begins every text, is no reason to overwrite a longer text.
_WORTH_KEEPING = 16


class Slot:
    """A row of the cache.

    Attributes:
        ticket: whose it is; None: it is free.
        cached: tokens whose keys and values are at positions 0, 1, ... of the row. They stay when the row becomes free,
            so that a prompt that begins with them need not be read again.
        text: prompt and answer so far.
        reuses: whether another row may still be asked for what it has of the prompt.
        order: number of the request that has the row, or had it last.
        has_bias: whether the biases of the row on the device may be other than zero.
    """

    def __init__(self, index: int):
        self.index = index
        self.ticket: Ticket | None = None
        self.cached: list[int] = []
        self.text: list[int] = []
        self.order = 0
        self.reuses = self.has_bias = False

    @property
    def reads(self) -> bool:
        """Whether a part of its prompt is still to be read."""
        return self.ticket is not None and len(self.cached) < len(self.ticket.request.tokens)

    @property
    def writes(self) -> bool:
        """Whether its next token can be computed from the last one alone."""
        return self.ticket is not None and not self.reads

    def take(self, ticket: Ticket, order: int) -> None:
        """Give the row to a request, and keep what its prompt begins with."""
        tokens = ticket.request.tokens
        self.ticket, self.order, self.text, self.reuses = ticket, order, list(tokens), True
        self.keep(kept_prefix(self, tokens))

    def keep(self, kept: int) -> None:
        """Note how many tokens of the prompt this row has."""
        assert self.ticket is not None
        self.cached, self.ticket.cached_tokens = self.text[:kept], kept

    def read(self, tokens: Sequence[int]) -> None:
        """Note that the next tokens of the text were written."""
        self.cached += tokens


def kept_prefix(slot: Slot, tokens: Sequence[int]) -> int:
    """Count the tokens of a prompt that need not be read in a row: not the last, whose logits are needed."""
    pairs = enumerate(zip(slot.cached, tokens, strict=False))
    shared = next((at for at, (one, other) in pairs if one != other), min(len(slot.cached), len(tokens)))
    return min(shared, len(tokens) - 1)


def slot_for(slots: Iterable[Slot], tokens: Sequence[int]) -> Slot | None:
    """Choose the free row that has most of a prompt, of equal ones that which was free for longest; None: none is."""
    free = [slot for slot in slots if slot.ticket is None]
    return max(free, key=lambda slot: (kept_prefix(slot, tokens) // _WORTH_KEEPING, -slot.order), default=None)


class Scheduler:
    """The slots of an engine, and the steps that move their texts on; `waiting` are the requests for slots."""

    def __init__(self, programs: Programs, waiting: deque[Ticket]):
        self._programs, self.waiting = programs, waiting
        self._slots = [Slot(index) for index in range(programs.slots)]
        self._rows = row_sampling([Sampling(temperature=0)] * programs.slots, [0] * programs.slots)
        self._orders = 0
        self.counters = EngineCounters()

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not len(self.waiting) and all(slot.ticket is None for slot in self._slots)

    def step(self) -> None:
        """Do what is next: at most one chunk of one prompt, and one token for every answer.

        So answers go on while a long prompt is read.
        """
        for ticket in self.waiting.copy():
            if ticket.cancelled is not None:
                self.waiting.remove(ticket)
                self._end(ticket, ticket.cancelled)
        for slot in self._slots:
            if slot.ticket is not None and slot.ticket.cancelled is not None:
                self._finish(slot, slot.ticket.cancelled)
        self._admit()
        reading = [slot for slot in self._slots if slot.reads]
        if reading:
            self._read(min(reading, key=lambda slot: slot.order))
        writing = [slot for slot in self._slots if slot.writes]
        if writing:
            self._write(writing)

    def fail_all(self, reason: str, error: str | None) -> None:
        """End every request that waits or runs."""
        while self.waiting:
            self._end(self.waiting.popleft(), reason, error)
        for slot in self._slots:
            if slot.ticket is not None:
                self._finish(slot, reason, error)

    def _count(self, **added: int) -> None:
        """Add to counters; the record is replaced as a whole, so that other threads read numbers that fit together."""
        now = self.counters
        self.counters = replace(now, **{name: getattr(now, name) + number for name, number in added.items()})

    def _admit(self) -> None:
        """Give free slots to the requests that wait, in their order."""
        while self.waiting and (slot := slot_for(self._slots, self.waiting[0].request.tokens)) is not None:
            ticket = self.waiting.popleft()
            request, sampling = ticket.request, ticket.request.sampling
            self._orders += 1
            slot.take(ticket, self._orders)
            row = row_sampling([sampling], [request.seed])
            jax.tree.map(lambda rows, one, index=slot.index: rows.__setitem__(index, one[0]), self._rows, row)
            if sampling.counts_tokens or sampling.logit_bias or slot.has_bias:
                self._set_penalties(slot, request)
            self._count(slots_in_use=1)

    def _set_penalties(self, slot: Slot, request: Request) -> None:
        size, sampling = self._programs.vocab_size, request.sampling
        counts_V = np.bincount(np.asarray(request.tokens), minlength=size).astype(np.int32)
        bias_SV = bias_rows([sampling], size)
        bias_V = np.zeros(size, np.float32) if bias_SV is None else bias_SV[0]
        self._programs.set_penalties(slot.index, counts_V, bias_V)
        slot.has_bias = bool(sampling.logit_bias)

    def _read(self, slot: Slot) -> None:
        """Read the next chunk of a slot's prompt; the last one gives the first token of the answer."""
        assert slot.ticket is not None
        if slot.reuses:  # once, and not when it got the slot: those that came with it may have read the same since
            self._borrow(slot)
        request, begin = slot.ticket.request, len(slot.cached)
        tokens = list(request.tokens[begin : begin + self._programs.chunk])
        end = begin + len(tokens)
        chosen = self._programs.prefill(
            slot.index,
            tokens,
            begin,
            _row_of(self._rows, slot.index),
            is_last=end == len(request.tokens),
            wants_top=request.top > 0,
        )
        slot.read(tokens)
        if end == len(request.tokens):
            self._emit(slot, _emitted(jax.device_get(chosen), 0, request.top))

    def _borrow(self, slot: Slot) -> None:
        """Copy what another slot has of a prompt, where that is worth it."""
        assert slot.ticket is not None
        tokens, slot.reuses = slot.ticket.request.tokens, False
        lender = max(self._slots, key=lambda other: kept_prefix(other, tokens))
        kept = kept_prefix(lender, tokens)
        if kept >= len(slot.cached) + _WORTH_KEEPING:
            self._programs.copy(lender.index, slot.index)
            slot.keep(kept)
        self._count(cached_tokens=slot.ticket.cached_tokens)

    def _write(self, writing: list[Slot]) -> None:
        """Give every answer its next token."""
        tokens_S = np.array([slot.text[-1] if slot.writes else 0 for slot in self._slots], np.int32)
        # A row without an answer writes nothing, and its old text makes the others read no more of the cache.
        positions_S = np.array([len(slot.cached) if slot.writes else NOWHERE for slot in self._slots], np.int32)
        wants_top = any(slot.ticket is not None and slot.ticket.request.top > 0 for slot in writing)
        chosen = self._programs.decode(tokens_S, positions_S, self._rows, wants_top=wants_top)
        for slot in writing:
            assert slot.ticket is not None
            slot.read([slot.text[-1]])
            self._emit(slot, _emitted(chosen, slot.index, slot.ticket.request.top))

    def _emit(self, slot: Slot, emitted: Emitted) -> None:
        """Hand out a token of a slot's answer, which may end it."""
        ticket = slot.ticket
        assert ticket is not None
        slot.text.append(emitted.token)
        self._count(generated_tokens=1)
        try:
            ticket.emit(emitted)
        except Exception as failure:  # an error of the caller's function ends its own request and no other
            return self._finish(slot, "failed", _line(failure))
        if emitted.token in ticket.request.stop_tokens:
            return self._finish(slot, "stop")
        if len(slot.text) == len(ticket.request.tokens) + ticket.request.new_tokens:
            return self._finish(slot, "length")

    def _finish(self, slot: Slot, reason: str, error: str | None = None) -> None:
        """End the request of a slot, which is free then; its keys and values stay."""
        ticket = slot.ticket
        assert ticket is not None
        slot.ticket, slot.text = None, []
        self._count(slots_in_use=-1)
        self._end(ticket, reason, error)

    def _end(self, ticket: Ticket, reason: str, error: str | None = None) -> None:
        self._count(finished=1)
        try:
            ticket.finish(reason, error)
        except Exception as failure:  # of the caller's function, which must not end the others' requests
            ticket.error = ticket.error or _line(failure)


def _line(failure: Exception) -> str:
    """The line for a function of the caller that failed."""
    return f"on_event of this request raised {type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


def _emitted(chosen: Chosen, index: int, top: int) -> Emitted:
    """One of several chosen tokens, with as many alternatives as were asked for."""
    ids, numbers = chosen.top_ids[index][:top].tolist(), chosen.top_log_probabilities[index][:top].tolist()
    alternatives = tuple(zip(ids, numbers, strict=True))
    return Emitted(int(chosen.tokens[index]), float(chosen.log_probabilities[index]), alternatives)


def _row_of(rows: RowSampling, index: int) -> RowSampling:
    return jax.tree.map(lambda whole: whole[index : index + 1].copy(), rows)
