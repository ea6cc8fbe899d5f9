"""The engine: a thread that serves many requests with one model, what it does next, and what other threads ask it."""

import atexit
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import jax
import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.inference.engine.programs import Chosen, Chunk, Programs, greedy_rows
from jaxtrain.inference.engine.request import (
    MOST_ALTERNATIVES,
    Emitted,
    EngineCounters,
    EngineDead,
    EngineFull,
    OnEvent,
    Request,
    Ticket,
)
from jaxtrain.inference.prompts import decoder_of
from jaxtrain.inference.sampling import RowSampling, row_sampling
from jaxtrain.models.model import NOWHERE, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.train.step import TrainStep

# A shorter common beginning, such as the token that begins every text, is no reason to overwrite a longer text.
_WORTH_KEEPING = 16


@dataclass(eq=False)
class Slot:
    """A row of the cache.

    Attributes:
        index: of the row.
        rewinds: whether a part of what is cached can be kept; else all of it or nothing.
        ticket: of the request that has the row; None: it is free.
        cached: tokens whose keys and values are at positions 0, 1, ... of the row. They stay when the row becomes free,
            so that a prompt that begins with them need not be read again.
        text: prompt and answer so far.
        order: number of the request that has the row, or had it last.
    """

    index: int
    rewinds: bool
    ticket: Ticket | None = None
    cached: list[int] = field(default_factory=list)
    text: list[int] = field(default_factory=list)
    order: int = 0

    @property
    def request(self) -> Request:
        """The request that has the row."""
        assert self.ticket
        return self.ticket.request

    @property
    def reads(self) -> bool:
        """Whether a part of its prompt is still to be read."""
        return self.ticket is not None and len(self.cached) < len(self.request.tokens)

    @property
    def writes(self) -> bool:
        """Whether its next token can be computed from the last one alone."""
        return self.ticket is not None and not self.reads

    def take(self, ticket: Ticket, order: int) -> None:
        """Give the row to a request, and keep what its prompt begins with."""
        ticket.cached_tokens = kept_prefix(self, ticket.request.tokens)
        self.ticket = ticket
        self.order = order
        self.text = list(ticket.request.tokens)
        self.cached = self.text[: ticket.cached_tokens]


def kept_prefix(slot: Slot, tokens: Sequence[int]) -> int:
    """Count the tokens of a prompt that a row has: all but the last, whose logits are needed, at most."""
    count = 0
    for cached, token in zip(slot.cached, tokens[:-1], strict=False):
        if cached != token:
            break
        count += 1
    if slot.rewinds or count == len(slot.cached):
        return count
    return 0


def slot_for(slots: Iterable[Slot], tokens: Sequence[int]) -> Slot | None:
    """Choose the free row that has most of a prompt, of equal ones that which was free for longest; None: none is."""
    free = [slot for slot in slots if slot.ticket is None]
    return max(free, key=lambda slot: (kept_prefix(slot, tokens) // _WORTH_KEEPING, -slot.order), default=None)


class Scheduler:
    """The slots of an engine, and the steps that move their texts on; `waiting` are the requests for slots."""

    def __init__(self, programs: Programs, waiting: deque[Ticket]):
        self._programs = programs
        self.waiting = waiting
        self._slots = [Slot(index, programs.keeps_positions) for index in range(programs.slots)]
        self._rows = greedy_rows(programs.slots)
        self._num_admitted = 0
        self.counters = EngineCounters()

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self.waiting and all(slot.ticket is None for slot in self._slots)

    def update(self, params: Params) -> None:
        """Take other parameters, between two requests: keys and values of the former ones are forgotten."""
        self._programs.update(params)
        for slot in self._slots:
            slot.cached = []

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
                self._free(slot, slot.ticket.cancelled)
        while self.waiting:
            slot = slot_for(self._slots, self.waiting[0].request.tokens)
            if slot is None:
                break
            self._admit(slot, self.waiting.popleft())
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
                self._free(slot, reason, error)

    def _admit(self, slot: Slot, ticket: Ticket) -> None:
        """Give a free slot to a request."""
        self._num_admitted += 1
        slot.take(ticket, self._num_admitted)
        self.counters.slots_in_use += 1
        row = _row_of(ticket.request)
        for values, value in zip(jax.tree.leaves(self._rows), jax.tree.leaves(row), strict=True):
            values[slot.index] = value[0]
        if ticket.request.sampling.counts_tokens:
            self._programs.begin_counts(slot.index, slot.text)

    def _read(self, slot: Slot) -> None:
        """Read the next chunk of a slot's prompt; the last one gives the first token of the answer."""
        begin = len(slot.cached)
        tokens = slot.text[begin : begin + self._programs.chunk]
        slot.cached += tokens
        chunk = Chunk(
            slot=np.int32(slot.index),
            tokens_C=np.array(tokens, np.int32),
            begin=np.int32(begin),
            count=np.int32(len(tokens)),
            is_last=np.bool_(not slot.reads),
            row=_row_of(slot.request),
            wants_top=np.bool_(slot.request.top > 0),
        )
        chosen = self._programs.prefill(chunk)
        if not slot.reads:
            self._emit(slot, jax.device_get(chosen), 0)

    def _write(self, writing: list[Slot]) -> None:
        """Give every answer its next token."""
        tokens_S = np.zeros(len(self._slots), np.int32)
        # A row without an answer writes nothing, and its old text makes the others read no more of the cache.
        positions_S = np.full(len(self._slots), NOWHERE, np.int32)
        for slot in writing:
            tokens_S[slot.index] = slot.text[-1]
            positions_S[slot.index] = len(slot.cached)
            slot.cached.append(slot.text[-1])
        wants_top = any(slot.request.top > 0 for slot in writing)
        chosen = self._programs.decode(tokens_S, positions_S, self._rows, wants_top=wants_top)
        for slot in writing:
            self._emit(slot, chosen, slot.index)

    def _emit(self, slot: Slot, chosen: Chosen, index: int) -> None:
        """Hand out a token of a slot's answer, which may end it."""
        request = slot.request
        top = zip(
            chosen.top_ids[index][: request.top].tolist(),
            chosen.top_log_probabilities[index][: request.top].tolist(),
            strict=True,
        )
        emitted = Emitted(int(chosen.tokens[index]), float(chosen.log_probabilities[index]), tuple(top))
        slot.text.append(emitted.token)
        self.counters.generated_tokens += 1
        assert slot.ticket
        slot.ticket.emit(emitted)
        if emitted.token in request.stop_tokens:
            self._free(slot, "stop")
        elif len(slot.text) == len(request.tokens) + request.new_tokens:
            self._free(slot, "length")

    def _free(self, slot: Slot, reason: str, error: str | None = None) -> None:
        """End the request of a slot; its keys and values stay."""
        ticket = slot.ticket
        assert ticket
        slot.ticket = None
        self.counters.slots_in_use -= 1
        self._end(ticket, reason, error)

    def _end(self, ticket: Ticket, reason: str, error: str | None = None) -> None:
        self.counters.finished += 1
        ticket.finish(reason, error)


def _row_of(request: Request) -> RowSampling:
    return row_sampling([request.sampling], [request.seed], [request.row])


class Engine:
    """Continuous batching: requests come and go while the model gives every slot a token per step.

    Two programs with static shapes serve all requests: one gives each slot its next token, one reads a chunk of a
    prompt into a slot. Both are compiled when the engine is made; no request compiles anything. The tokens of a
    request depend on its seed and its text, not on its slot or on what other slots do: the arithmetic is the same, so
    that only the rounding of sums may differ between a prompt that was read whole and one whose beginning was cached.

    Args:
        step: a sharded model (from `shard_model`) with a decoder, or a train step.
        params: of the model, on its mesh; also quantized. Those of a train step are copied, because its next call
            takes over the arrays of the state. Those of a sharded model are not, where they have the compute dtype.
        slots: rows of the cache: how many requests run at a time.
        length: positions of each row, for a prompt and its answer; None: all that the model has.
        chunk: tokens of a prompt that are read between two steps of the answers.
        cache_dtype: float32, bfloat16, float16 or int8, of keys and values; None: the model's compute dtype.
        queue: how many requests may wait for a slot while all slots are taken.

    Attributes:
        length: positions of the cache: most tokens of a prompt and its answer together.
        error: why the engine is dead, in one line; None: it is not.

    Raises:
        ConfigError: the model cannot generate or has an encoder, a number is out of its range, or the devices have no
            room for the cache.

    Example:
        >>> sharded = jt.shard_model(text_model)
        >>> text_params, _ = jax.jit(sharded.init)(jax.random.key(0))
        >>> with jt.Engine(sharded, text_params, slots=2) as engine:
        ...     ticket = engine.submit(jt.Request((72, 105), new_tokens=4, sampling=jt.Sampling(temperature=0)))
        ...     tokens = [emitted.token for emitted in ticket]
        >>> len(tokens), ticket.finish_reason
        (4, 'length')
    """

    def __init__(
        self,
        step: TrainStep | ShardedModel,
        params: Params,
        *,
        slots: int = 8,
        length: int | None = None,
        chunk: int = 128,
        cache_dtype: str | None = None,
        queue: int = 256,
    ):
        sharded_model = step.sharded_model if isinstance(step, TrainStep) else step
        decoder = decoder_of(sharded_model.model, has_encoder=False)
        # One cache serves short and long texts, whose positions may rotate by different frequencies.
        longest = min(decoder.max_length, decoder.short_length or decoder.max_length)
        self.length = longest if length is None else length
        if not 2 <= self.length <= longest or min(slots, chunk, queue) < 1:
            raise ConfigError(
                f"length is {self.length}, slots {slots}, chunk {chunk} and queue {queue}; use a length from 2 to "
                f"{longest}, and 1 or more of the others"
            )
        programs = Programs(
            sharded_model,
            params,
            slots=slots,
            length=self.length,
            chunk=min(chunk, self.length),
            cache_dtype=cache_dtype,
        )
        if isinstance(step, TrainStep):
            programs.update(params)
        programs.compile()
        self.error: str | None = None
        self._vocab_size = programs.vocab_size
        self._max_requests = slots + queue
        self._waiting: deque[Ticket] = deque()
        self._scheduler = Scheduler(programs, self._waiting)
        self._changed = threading.Condition()
        self._num_accepted = 0
        self._closing = False
        self._draining = False
        self._thread = threading.Thread(target=self._serve, name="jaxtrain engine", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def start(self) -> None:
        """Start the thread that serves requests."""
        self._thread.start()
        # An interpreter that ends while the thread is inside of jax would abort.
        atexit.register(self.close, drain=False)

    def submit(self, request: Request, on_event: OnEvent | None = None) -> Ticket:
        """Ask for the continuation of a prompt.

        Args:
            request: prompt and settings.
            on_event: (ticket, token) is called on the engine's thread with each token, and with None at the end; it
                may not raise.

        Returns:
            The ticket: an iterable of the tokens.

        Raises:
            EngineFull: all slots are taken, and as many requests wait as the queue takes.
            EngineDead: the engine was closed, or its device failed.
            ConfigError: a number of the request is out of its range, the prompt and the new tokens exceed the cache, or
                an id is outside the vocabulary.
        """
        self._check(request)
        ticket = Ticket(request, on_event, self._wake)
        with self._changed:
            self._check_open()
            # Until the next step a request waits whose slot is free, so that what has not ended is counted.
            if self._num_unfinished() >= self._max_requests:
                raise EngineFull(
                    f"{self._max_requests} requests are running or waiting, the engine's limit; try again later"
                )
            self._waiting.append(ticket)
            self._num_accepted += 1
            self._changed.notify()
        return ticket

    def update(self, params: Params) -> None:
        """Go on with other parameters, as after a step of training; nothing is compiled.

        It is refused while a request waits or runs, so that no answer mixes both. Keys and values of the former
        parameters are forgotten.

        Args:
            params: of the same model, as in `state.params`, on any mesh. They are copied, so that a step may take
                over the arrays afterwards.

        Raises:
            EngineFull: a request waits or runs; a later attempt may succeed.
            EngineDead: the engine was closed, or its device failed.
        """
        with self._changed:  # nothing is submitted meanwhile
            self._check_open()
            if self._num_unfinished():
                raise EngineFull("requests are running or waiting; update the parameters when they have ended")
            self._scheduler.update(params)

    def close(self, *, drain: bool = True) -> None:
        """Accept no more requests, and end the thread; without `drain` what waits or runs ends as cancelled."""
        with self._changed:
            self._draining = drain
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        atexit.unregister(self.close)

    def counters(self) -> EngineCounters:
        """Return what the engine did since it was started; any thread may ask."""
        return replace(self._scheduler.counters, requests=self._num_accepted, queued=len(self._waiting))

    def _check(self, request: Request) -> None:
        if not request.tokens or min(request.tokens) < 0 or max(request.tokens) >= self._vocab_size:
            raise ConfigError(f"a request takes at least one token, of ids from 0 to {self._vocab_size - 1}")
        if not 0 <= request.top <= MOST_ALTERNATIVES:
            raise ConfigError(f"top is {request.top}; use top from 0 to {MOST_ALTERNATIVES}")
        if request.new_tokens < 1 or len(request.tokens) + request.new_tokens > self.length:
            raise ConfigError(
                f"a prompt of {len(request.tokens)} tokens and {request.new_tokens} new ones: use 1 or more new "
                f"tokens, and at most {self.length} together"
            )

    def _check_open(self) -> None:
        if self._closing:
            raise EngineDead(self.error or "the engine is closed; start another one")

    def _num_unfinished(self) -> int:
        return self._num_accepted - self._scheduler.counters.finished

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _serve(self) -> None:
        """Do steps until the engine is closed or the device fails; runs on the engine's thread."""
        try:
            while self._waits_for_work():
                self._scheduler.step()
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            with self._changed:  # whoever comes later is refused
                self.error = f"the engine stopped, because a step on its device failed: {reason}"
                self._closing = True
        self._scheduler.fail_all("cancelled" if self.error is None else "failed", self.error)

    def _waits_for_work(self) -> bool:
        """Wait while there is nothing to do; return whether another step is to be taken."""
        with self._changed:
            while self._scheduler.is_idle and not self._closing:
                self._changed.wait()
            return not self._closing or (self._draining and not self._scheduler.is_idle)
