"""What the engine does next: which request gets which slot, which prompt is read, and when all slots get a token.

Not thread-safe: the engine's thread alone calls it, under no lock.
"""

import threading
from collections import deque
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxtrain.inference.choose import RowSampling, bias_rows, row_sampling
from jaxtrain.inference.engine.compiled import Programs
from jaxtrain.inference.engine.drafts import accepted
from jaxtrain.inference.engine.programs import Chosen
from jaxtrain.inference.engine.request import Emitted, EngineCounters, Request
from jaxtrain.inference.engine.slots import Slot, lender_for, slot_for
from jaxtrain.inference.engine.ticket import Ticket
from jaxtrain.inference.sampling import Sampling
from jaxtrain.models.decoder import NOWHERE, Ring


class Waiting:
    """The requests that wait for a slot, in their order; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets: deque[Ticket] = deque()

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """Append a request."""
        with self._lock:
            self._tickets.append(ticket)

    def first(self) -> Ticket | None:
        """Take the first request away; None where none waits."""
        with self._lock:
            return self._tickets.popleft() if self._tickets else None

    def put_back(self, ticket: Ticket) -> None:
        """Put a request at the front again."""
        with self._lock:
            self._tickets.appendleft(ticket)

    def without_cancelled(self) -> list[Ticket]:
        """Take the cancelled requests away."""
        with self._lock:
            gone = [ticket for ticket in self._tickets if ticket.cancelled is not None]
            self._tickets = deque(ticket for ticket in self._tickets if ticket.cancelled is None)
            return gone


class Scheduler:
    """The slots of an engine, and the steps that move their texts on.

    Args:
        programs: compiled.
        waiting: requests for slots.
        length: positions of the cache.
        speculate: longest draft; 0: none.
        reuse: whether a prompt keeps what a slot has of it.
        ring: of layers with a window; None: the cache keeps all positions.

    Attributes:
        counters: what was done.
        waiting: requests for slots.
    """

    def __init__(
        self,
        programs: Programs,
        waiting: Waiting,
        *,
        length: int,
        speculate: int,
        reuse: bool,
        ring: Ring | None = None,
    ):
        self._programs, self._length, self._speculate, self._reuse = programs, length, speculate, reuse
        self.waiting = waiting
        self._slots = [Slot(index, ring) for index in range(programs.slots)]
        self._rows = row_sampling([Sampling(temperature=0)] * programs.slots, [0] * programs.slots)
        self._orders = 0
        self.counters = EngineCounters(slots=programs.slots)

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not len(self.waiting) and all(slot.ticket is None for slot in self._slots)

    def step(self) -> bool:
        """Do what is next: at most one chunk of one prompt, and one token (or an accepted draft) for every answer.

        So answers go on while a long prompt is read.

        Returns:
            Whether there was anything to do.
        """
        self._drop_cancelled()
        self._admit()
        reading = [slot for slot in self._slots if slot.reads]
        if reading:
            self._read(min(reading, key=lambda slot: slot.order))
        writing = [slot for slot in self._slots if slot.writes]
        if writing:
            self._write(writing)
        return bool(reading or writing)

    def fail_all(self, reason: str, error: str | None) -> None:
        """End every request that waits or runs."""
        while (ticket := self.waiting.first()) is not None:
            self._end(ticket, reason, error)
        for slot in self._slots:
            if slot.ticket is not None:
                self._finish(slot, reason, error)

    def _count(self, **added: int) -> None:
        """Add to counters; the record is replaced as a whole, so that other threads read numbers that fit together."""
        now = self.counters
        self.counters = replace(now, **{name: getattr(now, name) + number for name, number in added.items()})

    def _drop_cancelled(self) -> None:
        for ticket in self.waiting.without_cancelled():
            self._end(ticket, ticket.cancelled or "cancelled")
        for slot in self._slots:
            if slot.ticket is not None and slot.ticket.cancelled is not None:
                self._finish(slot, slot.ticket.cancelled)

    def _admit(self) -> None:
        """Give free slots to the requests that wait, in their order."""
        while (ticket := self.waiting.first()) is not None:
            slot = slot_for(self._slots, ticket.request.tokens)
            if slot is None:
                self.waiting.put_back(ticket)
                return
            request, sampling = ticket.request, ticket.request.sampling
            self._orders += 1
            changed = sampling.counts_tokens or bool(sampling.logit_bias)
            slot.take(
                ticket,
                self._orders,
                # A token of the prompt that is not read has no logits.
                reuse=self._reuse and not request.prompt_log_probabilities,
                # The model's own likeliest tokens are what verification compares with.
                speculate=self._speculate > 0 and sampling.is_greedy and not changed,
            )
            _set_row(self._rows, slot.index, row_sampling([sampling], [request.seed]))
            if changed or slot.has_bias:
                self._set_penalties(slot, request)
            if request.prompt_log_probabilities:
                ticket.prompt_log_probabilities = [None]
            self._count(prompt_tokens=len(request.tokens), slots_in_use=1)

    def _set_penalties(self, slot: Slot, request: Request) -> None:
        size, sampling = self._programs.vocab_size, request.sampling
        # Only a repetition penalty asks for the tokens of the prompt.
        counts_V = np.bincount(np.asarray(request.tokens), minlength=size).astype(np.int32)
        bias_SV = bias_rows([sampling], size)
        bias_V = np.zeros(size, np.float32) if bias_SV is None else bias_SV[0]
        self._programs.set_penalties(slot.index, counts_V, bias_V)
        slot.has_bias = bool(sampling.logit_bias)

    def _read(self, slot: Slot) -> None:
        """Read the next chunk of a slot's prompt; the last one gives the first token of the answer."""
        assert slot.ticket is not None
        if slot.reuses:  # once, and not when it got the slot: those that came with it may have read the same since
            self._reuse_prefix(slot)
        request, begin = slot.ticket.request, len(slot.cached)
        tokens = list(request.tokens[begin : begin + self._programs.chunk])
        end = begin + len(tokens)
        chosen, prompt = self._programs.prefill(
            slot.index,
            tokens,
            begin,
            _row_of(self._rows, slot.index),
            is_last=end == len(request.tokens),
            wants_top=request.top > 0,
            next_tokens=list(request.tokens[begin + 1 : end + 1]) if request.prompt_log_probabilities else None,
        )
        self._count(prefill_chunks=1)
        slot.cached += tokens
        slot.wrote(end)
        entries = slot.ticket.prompt_log_probabilities
        if entries is not None:
            given = jax.device_get(prompt)
            following = min(len(tokens), len(request.tokens) - 1 - begin)
            entries += [_emitted(given, index, request.top) for index in range(following)]
        if end == len(request.tokens):
            self._emit(slot, [_emitted(jax.device_get(chosen), 0, request.top)])

    def _reuse_prefix(self, slot: Slot) -> None:
        """Take over what another slot has of a prompt, where that is more than its own slot kept."""
        assert slot.ticket is not None
        lender, kept = lender_for(slot, self._slots)
        if lender is not None:
            self._programs.copy(lender.index, slot.index)
            slot.borrow(lender, kept)
        slot.reuses = False
        self._count(cached_tokens=slot.ticket.cached_tokens)

    def _write(self, writing: list[Slot]) -> None:
        """Give every answer its next token, or more where drafts are right."""
        drafts = {slot.index: self._draft(slot) for slot in writing if slot.drafts is not None}
        width = 1 + self._speculate if any(drafts.values()) else 1
        tokens_SW = np.zeros((len(self._slots), width), np.int32)
        # A row without an answer writes nothing, and its old text makes the others read no more of the cache.
        positions_S = np.array([len(slot.cached) if slot.writes else NOWHERE for slot in self._slots], np.int32)
        writes_S = np.array([slot.writes for slot in self._slots])
        for slot in writing:
            draft = drafts.get(slot.index, [])
            tokens_SW[slot.index, : 1 + len(draft)] = [slot.text[-1], *draft]
        tickets = [slot.ticket for slot in writing]
        wants_top = any(ticket is not None and ticket.request.top > 0 for ticket in tickets)
        chosen = self._programs.decode(tokens_SW, positions_S, writes_S, self._rows, wants_top=wants_top)
        self._count(decode_steps=1)
        for slot in writing:
            assert slot.ticket is not None
            draft = drafts.get(slot.index, [])
            slot.wrote(len(slot.cached) + width)
            right = accepted(draft, chosen.tokens[slot.index].tolist())
            self._count(speculated_tokens=len(draft), accepted_tokens=right)
            slot.cached += [slot.text[-1], *draft[:right]]
            of_slot = jax.tree.map(lambda leaf, index=slot.index: leaf[index], chosen)
            self._emit(slot, [_emitted(of_slot, index, slot.ticket.request.top) for index in range(right + 1)])

    def _draft(self, slot: Slot) -> list[int]:
        """A draft of a slot's next tokens, not beyond the cache or the end of the answer; empty: none."""
        assert slot.drafts is not None
        assert slot.ticket is not None
        left = min(slot.ticket.request.new_tokens - slot.emitted - 1, self._length - len(slot.cached) - 1)
        return slot.drafts.propose(min(self._speculate, left)) if left > 0 else []

    def _emit(self, slot: Slot, emitted: list[Emitted]) -> None:
        """Hand out tokens of a slot's answer, up to the one that ends it."""
        ticket = slot.ticket
        assert ticket is not None
        for one in emitted:
            slot.text.append(one.token)
            slot.emitted += 1
            if slot.drafts is not None:
                slot.drafts.extend([one.token])
            self._count(generated_tokens=1)
            if not _handed(ticket, one):
                return self._finish(slot, "failed", ticket.error)
            if one.token in ticket.request.stop_tokens:
                return self._finish(slot, "stop")
            if slot.emitted == ticket.request.new_tokens:
                return self._finish(slot, "length")

    def _finish(self, slot: Slot, reason: str, error: str | None = None) -> None:
        ticket = slot.ticket
        assert ticket is not None
        slot.release()
        self._count(slots_in_use=-1)
        self._end(ticket, reason, error)

    def _end(self, ticket: Ticket, reason: str, error: str | None = None) -> None:
        self._count(finished=1)
        try:
            ticket.finish(reason, error)
        except Exception as failure:  # of the caller's function, which must not end the others' requests
            ticket.error = ticket.error or _line(failure)


def _handed(ticket: Ticket, emitted: Emitted) -> bool:
    """Whether the caller took a token: an error of its function ends its own request and no other."""
    try:
        ticket.emit(emitted)
    except Exception as failure:
        ticket.error = _line(failure)
        return False
    return True


def _line(failure: Exception) -> str:
    """The line for a function of the caller that failed."""
    return f"on_event of this request raised {type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


def _emitted(chosen: Chosen, index: int, top: int) -> Emitted:
    """One of several chosen tokens, with as many alternatives as were asked for."""
    ids, numbers = chosen.top_ids[index][:top].tolist(), chosen.top_log_probabilities[index][:top].tolist()
    alternatives = tuple(zip(ids, numbers, strict=True))
    return Emitted(int(chosen.tokens[index]), float(chosen.log_probabilities[index]), alternatives)


def _set_row(rows: RowSampling, index: int, row: RowSampling) -> None:
    """Write the arrays [1] of a row into those of all rows, on the host."""

    def write(whole: Any, one: Any) -> None:
        whole[index] = one[0]

    jax.tree.map(write, rows, row)


def _row_of(rows: RowSampling, index: int) -> RowSampling:
    return jax.tree.map(lambda whole: whole[index : index + 1].copy(), rows)
