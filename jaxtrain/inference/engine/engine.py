"""The engine: a thread that serves many requests with one model, and what other threads ask it."""

import atexit
import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import jax

from jaxtrain.errors import ConfigError
from jaxtrain.inference.engine.programs import Programs
from jaxtrain.inference.engine.request import EngineCounters, EngineDead, EngineFull, OnEvent, Request, Ticket
from jaxtrain.inference.engine.scheduler import Scheduler
from jaxtrain.inference.prompts import decoder_of
from jaxtrain.inference.sampling import bias_rows
from jaxtrain.models.model import Params
from jaxtrain.models.sharded import ShardedModel

_CLOSED = "the engine is closed; start another one"
# What the thread gets to end in where the interpreter ends: an `on_event` that waits for the program never returns.
_ENDING_SECONDS = 10.0


class CompileCounter:
    """How many programs a thread compiled, or read from the cache of compiled programs, while it was watched.

    Attributes:
        count: of them.
    """

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


class Engine:
    """Continuous batching: requests come and go while the model gives every slot a token per step.

    Two programs with static shapes serve all requests: one gives each slot its next token, one reads a chunk of a
    prompt into a slot. Both are compiled by `start`; no request compiles anything. The tokens of a request depend on
    its seed and its text, not on its slot or on what other slots do: the arithmetic is the same, so that only the
    rounding of sums may differ between a prompt that was read whole and one whose beginning was there already.

    Args:
        sharded_model: has a decoder; from `shard_model`.
        params: of the model, on its mesh; also quantized.
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
        sharded_model: ShardedModel,
        params: Params,
        *,
        slots: int = 8,
        length: int | None = None,
        chunk: int = 128,
        cache_dtype: str | None = None,
        queue: int = 256,
    ):
        name, decoder = sharded_model.model.name, decoder_of(sharded_model.model)
        if decoder.encode is not None or jax.process_count() > 1:
            raise ConfigError(
                f"the engine serves models without an encoder in one process, and not {name}; use generate_text"
            )
        # One cache serves short and long texts, whose positions may rotate by different frequencies.
        longest = min(decoder.max_length, decoder.short_length or decoder.max_length)
        self.length = longest if length is None else length
        if not 2 <= self.length <= longest or min(slots, chunk, queue) < 1:
            raise ConfigError(
                f"length is {self.length}, slots {slots}, chunk {chunk} and queue {queue}; use a length from 2 to "
                f"{longest}, and 1 or more of the others"
            )
        self._slots, self._chunk, self._queue = slots, min(chunk, self.length), queue
        self._model, self._params, self._cache_dtype = sharded_model, params, cache_dtype
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
        programs.warm()
        self._params, self._vocab_size = programs.params, programs.vocab_size
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
        assert self._scheduler is not None, "start() comes first"
        if len(request.tokens) + request.new_tokens > self.length or max(request.tokens) >= self._vocab_size:
            raise ConfigError(
                f"a prompt of {len(request.tokens)} tokens and {request.new_tokens} new ones: together they may have "
                f"{self.length} tokens, of ids from 0 to {self._vocab_size - 1}"
            )
        bias_rows([request.sampling], self._vocab_size)  # whose ids are checked too
        ticket = Ticket(request, on_event, self._wake)
        with self._changed:
            if self._closing:
                raise EngineDead(self.error or _CLOSED)
            # Until the next step a request waits whose slot is free, so that what has not ended is counted.
            if self._accepted - self._scheduler.counters.finished >= self._slots + self._queue:
                raise EngineFull(
                    f"{self._slots + self._queue} requests run or wait, as many as the engine takes; try again later"
                )
            self._waiting.append(ticket)
            self._accepted += 1
            self._changed.notify()
        return ticket

    def close(self, *, drain: bool = True) -> None:
        """Accept no more requests, and end the thread.

        Args:
            drain: whether the requests that wait or run are finished first; otherwise they end as cancelled.
        """
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
