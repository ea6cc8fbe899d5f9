"""The engine: a thread that serves many requests with one model, what it does next, and what other threads ask it."""

import atexit
import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.inference.engine.programs import Chosen, Chunk, Programs
from jaxtrain.inference.engine.request import (
    Emitted,
    EngineCounters,
    EngineDead,
    EngineFull,
    OnEvent,
    Request,
    Ticket,
)
from jaxtrain.inference.prompts import decoder_of
from jaxtrain.inference.sampling import Sampling, row_sampling
from jaxtrain.models.model import NOWHERE, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.train.step import TrainStep

_CLOSED = "the engine is closed; start another one"
# What the thread gets to end in where the interpreter ends: an `on_event` that waits for the program never returns.
_ENDING_SECONDS = 10.0
# A shorter common beginning, such as the token that begins every text, is no reason to overwrite a longer text.
_WORTH_KEEPING = 16


class CompileCounter:
    """`count` is how many programs a thread compiled, or read from the cache of them, while it was watched."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Count what the calling thread compiles inside."""
        thread = threading.get_ident()

        def listen(event: str, duration_secs: float, **_: Any) -> None:
            if event == "/jax/core/compile/backend_compile_duration" and threading.get_ident() == thread:
                self.count += 1

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)


class Slot:
    """A row of the cache.

    Attributes:
        ticket: whose it is; None: it is free.
        cached: tokens whose keys and values are at positions 0, 1, ... of the row. They stay when the row becomes free,
            so that a prompt that begins with them need not be read again.
        text: prompt and answer so far.
        order: number of the request that has the row, or had it last.
        rewinds: whether a part of what is cached can be kept; else all of it or nothing.
    """

    def __init__(self, index: int, *, rewinds: bool = True):
        self.index, self.rewinds = index, rewinds
        self.ticket: Ticket | None = None
        self.cached: list[int] = []
        self.text: list[int] = []
        self.order = 0

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
        kept = kept_prefix(self, tokens)
        self.ticket, self.order, self.text = ticket, order, list(tokens)
        self.cached, ticket.cached_tokens = self.text[:kept], kept


def kept_prefix(slot: Slot, tokens: Sequence[int]) -> int:
    """Count the tokens of a prompt that a row has: all but the last, whose logits are needed, at most."""
    pairs = enumerate(zip(slot.cached, tokens, strict=False))
    shared = next((at for at, (one, other) in pairs if one != other), min(len(slot.cached), len(tokens)))
    shared = min(shared, len(tokens) - 1)
    return shared if slot.rewinds or shared == len(slot.cached) else 0


def slot_for(slots: Iterable[Slot], tokens: Sequence[int]) -> Slot | None:
    """Choose the free row that has most of a prompt, of equal ones that which was free for longest; None: none is."""
    free = [slot for slot in slots if slot.ticket is None]
    return max(free, key=lambda slot: (kept_prefix(slot, tokens) // _WORTH_KEEPING, -slot.order), default=None)


class Scheduler:
    """The slots of an engine, and the steps that move their texts on; `waiting` are the requests for slots."""

    def __init__(self, programs: Programs, waiting: deque[Ticket]):
        self._programs, self.waiting = programs, waiting
        self._slots = [Slot(index, rewinds=programs.keeps_positions) for index in range(programs.slots)]
        self._rows = row_sampling([Sampling(temperature=0)] * programs.slots, [0] * programs.slots)
        self._orders = 0
        self.counters = EngineCounters()

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not len(self.waiting) and all(slot.ticket is None for slot in self._slots)

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
            row = row_sampling([sampling], [request.seed], [request.row])
            jax.tree.map(lambda rows, one, index=slot.index: rows.__setitem__(index, one[0]), self._rows, row)
            if sampling.counts_tokens:
                size = self._programs.vocab_size
                counts_V = np.bincount(np.asarray(request.tokens), minlength=size).astype(np.int32)
                self._programs.begin_counts(slot.index, counts_V)
            self._count(slots_in_use=1, cached_tokens=ticket.cached_tokens)

    def _read(self, slot: Slot) -> None:
        """Read the next chunk of a slot's prompt; the last one gives the first token of the answer."""
        assert slot.ticket is not None
        request, begin = slot.ticket.request, len(slot.cached)
        tokens = request.tokens[begin : begin + self._programs.chunk]
        is_last = begin + len(tokens) == len(request.tokens)
        row = jax.tree.map(lambda rows: rows[slot.index : slot.index + 1].copy(), self._rows)
        numbers = np.int32(slot.index), np.array(tokens, np.int32), np.int32(begin), np.int32(len(tokens))
        chosen = self._programs.prefill(Chunk(*numbers, np.bool_(is_last), row, np.bool_(request.top > 0)))
        slot.cached += tokens
        if is_last:
            self._emit(slot, _emitted(jax.device_get(chosen), 0, request.top))

    def _write(self, writing: list[Slot]) -> None:
        """Give every answer its next token."""
        tokens_S = np.array([slot.text[-1] if slot.writes else 0 for slot in self._slots], np.int32)
        # A row without an answer writes nothing, and its old text makes the others read no more of the cache.
        positions_S = np.array([len(slot.cached) if slot.writes else NOWHERE for slot in self._slots], np.int32)
        wants_top = any(slot.ticket is not None and slot.ticket.request.top > 0 for slot in writing)
        chosen = self._programs.decode(tokens_S, positions_S, self._rows, wants_top=wants_top)
        for slot in writing:
            assert slot.ticket is not None
            slot.cached.append(slot.text[-1])
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


class Engine:
    """Continuous batching: requests come and go while the model gives every slot a token per step.

    Two programs with static shapes serve all requests: one gives each slot its next token, one reads a chunk of a
    prompt into a slot. Both are compiled by `start`; no request compiles anything. The tokens of a request depend on
    its seed and its text, not on its slot or on what other slots do: the arithmetic is the same, so that only the
    rounding of sums may differ between a prompt that was read whole and one whose beginning was there already.

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
        ConfigError: the model cannot generate or has an encoder, or a number is out of its range.

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
        self._is_trained = isinstance(step, TrainStep)
        self._model = step.sharded_model if isinstance(step, TrainStep) else step
        decoder = decoder_of(self._model.model, has_encoder=False)
        # One cache serves short and long texts, whose positions may rotate by different frequencies.
        longest = min(decoder.max_length, decoder.short_length or decoder.max_length)
        self.length = longest if length is None else length
        if not 2 <= self.length <= longest or min(slots, chunk, queue) < 1:
            raise ConfigError(
                f"length is {self.length}, slots {slots}, chunk {chunk} and queue {queue}; use a length from 2 to "
                f"{longest}, and 1 or more of the others"
            )
        self._slots, self._chunk, self._queue = slots, min(chunk, self.length), queue
        self._params = params
        self._cache_dtype = cache_dtype
        self._waiting: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._accepted = 0
        self._closing = self._draining = False
        self.error: str | None = None
        self._compiles = CompileCounter()
        self._scheduler: Scheduler | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def start(self) -> None:
        """Compile the programs, run each once, and start the thread that serves requests.

        Raises:
            ConfigError: the devices have no room for the cache.
        """
        programs = Programs(
            self._model,
            self._params,
            slots=self._slots,
            length=self.length,
            chunk=self._chunk,
            cache_dtype=self._cache_dtype,
        )
        if self._is_trained:
            programs.update(self._params)
        programs.warm()
        del self._params
        self._vocab_size = programs.vocab_size
        self._scheduler = Scheduler(programs, self._waiting)
        self._thread = threading.Thread(target=self._serve, name="jaxtrain engine", daemon=True)
        self._thread.start()
        # An interpreter that ends while the thread is inside of jax would abort.
        atexit.register(self._close, False, _ENDING_SECONDS)

    def submit(self, request: Request, on_event: OnEvent | None = None) -> Ticket:
        """Ask for the continuation of a prompt.

        Args:
            request: prompt and settings.
            on_event: (ticket, token) is called on the engine's thread with each token, and with None at the end; what
                it raises ends this request as failed.

        Returns:
            The ticket: an iterable of the tokens.

        Raises:
            EngineFull: all slots are taken, and as many requests wait as the queue takes.
            EngineDead: the engine was not started or was closed, or its device failed.
            ConfigError: the prompt and the new tokens exceed the cache, or an id is outside the vocabulary.
        """
        assert self._scheduler is not None, "call start() first"
        if len(request.tokens) + request.new_tokens > self.length or max(request.tokens) >= self._vocab_size:
            raise ConfigError(
                f"a prompt of {len(request.tokens)} tokens and {request.new_tokens} new ones: together they may have "
                f"{self.length} tokens, of ids from 0 to {self._vocab_size - 1}"
            )
        ticket = Ticket(request, on_event, self._wake)
        with self._changed:
            if self._closing:
                raise EngineDead(self.error or _CLOSED)
            # Until the next step a request waits whose slot is free, so that what has not ended is counted.
            if self._accepted - self._scheduler.counters.finished >= self._slots + self._queue:
                raise EngineFull(
                    f"{self._slots + self._queue} requests are running or waiting, the engine's limit; try again later"
                )
            self._waiting.append(ticket)
            self._accepted += 1
            self._changed.notify()
        return ticket

    def update(self, params: Params) -> None:
        """Go on with other parameters, as after a step of training; nothing is compiled.

        It is refused while a request waits or runs, so that no answer is of both. Keys and values of the former
        parameters are forgotten.

        Args:
            params: of the same model, as in `state.params`, on any mesh. They are copied, so that a step may take
                over the arrays afterwards.

        Raises:
            EngineFull: a request waits or runs; a later attempt may succeed.
            EngineDead: the engine was closed, or its device failed.
            ConfigError: they are of another model.
        """
        assert self._scheduler is not None, "call start() first"
        with self._changed:  # nothing is submitted meanwhile
            if self._closing:
                raise EngineDead(self.error or _CLOSED)
            if self._accepted > self._scheduler.counters.finished:
                raise EngineFull("requests are running or waiting; update the parameters when they have ended")
            self._scheduler.update(params)

    def close(self, *, drain: bool = True) -> None:
        """Accept no more requests, and end the thread; without `drain` what waits or runs ends as cancelled."""
        self._close(drain, None)
        atexit.unregister(self._close)

    def counters(self) -> EngineCounters:
        """What the engine did since it was started; any thread may ask."""
        done = EngineCounters() if self._scheduler is None else self._scheduler.counters
        return replace(done, requests=self._accepted, queued=len(self._waiting), compiled=self._compiles.count)

    def _close(self, drain: bool, seconds: float | None) -> None:
        """`close`, which waits for the thread for so long; None: until it ends."""
        with self._changed:
            self._draining = drain and (self._draining or not self._closing)
            self._closing = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _serve(self) -> None:
        """What the thread does, until it is closed or the device fails."""
        scheduler = self._scheduler
        assert scheduler is not None
        with self._compiles.on_this_thread():
            try:
                while self._waits_for_work(scheduler):
                    scheduler.step()
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                with self._changed:  # whoever comes later is refused
                    self.error = f"the engine stopped, because a step on its device failed: {reason}"
                    self._closing = True
            scheduler.fail_all("cancelled" if self.error is None else "failed", self.error)

    def _waits_for_work(self, scheduler: Scheduler) -> bool:
        """Whether another step is to be taken; waits while there is nothing to do."""
        with self._changed:
            while scheduler.is_idle and not self._closing:
                self._changed.wait()
            return not self._closing or (self._draining and not scheduler.is_idle)
