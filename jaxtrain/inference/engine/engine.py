"""The engine: a thread that serves many requests with one model, and what other threads ask it."""

import atexit
import threading
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import jax
from jax.sharding import NamedSharding

from jaxtrain.config.arguments import check_choice, check_kind, check_whole
from jaxtrain.errors import ConfigError
from jaxtrain.inference.choose import bias_rows
from jaxtrain.inference.engine.compiled import Programs
from jaxtrain.inference.engine.compiles import CompileCounter
from jaxtrain.inference.engine.request import EngineCounters, EngineDead, EngineFull, Request
from jaxtrain.inference.engine.scheduler import Scheduler, Waiting
from jaxtrain.inference.engine.ticket import OnEvent, Ticket
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import Decoder, Params
from jaxtrain.models.ring_cache import ring_of
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.train.step import check_not_donated

_CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8")
_CLOSED = "the engine is closed; start another one"
# What the thread gets to end in where the interpreter ends: an `on_event` that waits for the program never returns.
_ENDING_SECONDS = 10.0


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
        speculate: longest draft by prompt lookup, verified in one step, for greedy requests without penalties; 0: none.
        reuse_prefixes: whether a prompt that begins like the text of a slot keeps, or copies, what that slot holds.

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
        speculate: int = 0,
        reuse_prefixes: bool = True,
    ):
        write = "Engine(sharded_model, params, slots=8)"
        takes = "a model on a mesh, from shard_model"
        check_kind(sharded_model, ShardedModel, what="Engine: sharded_model", takes=takes, write=write)
        decoder = _decoder_of(sharded_model)
        check_not_donated(params)
        _check_places(params, sharded_model)
        check_kind(params, dict, what="Engine: params", takes="the parameters of the model", write=write)
        self._slots = check_whole(slots, what="Engine: slots", least=1, write="slots=8")
        self._length = checked_length(decoder, length, what="Engine: length")
        chunk = check_whole(chunk, what="Engine: chunk", least=1, write="chunk=128")
        self._chunk = min(chunk, self._length)
        if cache_dtype is not None:
            check_choice(cache_dtype, _CACHE_DTYPES, what="Engine: cache_dtype", write="cache_dtype='bfloat16'")
        queue = check_whole(queue, what="Engine: queue", least=1, write="queue=256")
        speculate = check_whole(speculate, what="Engine: speculate", least=0, write="speculate=4")
        self._speculate = min(speculate, self._length - 1)
        self._ring = ring_of(decoder, self._length, max(self._chunk, 1 + self._speculate))
        self._reuse, self._cache_dtype, self._queue = reuse_prefixes, cache_dtype, queue
        self._model, self._params = sharded_model, params
        self._waiting = Waiting()
        self._changed = threading.Condition()
        self._accepted = 0
        self._closing = self._draining = False
        self._dead: str | None = None
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

    @property
    def length(self) -> int:
        """Positions of the cache: most tokens of a prompt and its answer together."""
        return self._length

    def start(self) -> None:
        """Compile the programs, run each once, and start the thread that serves requests.

        Raises:
            ConfigError: it was started before, or the devices have no room for the cache.
        """
        if self._thread is not None or self._closing:
            raise ConfigError("this engine was started before; make another Engine")
        programs = Programs(
            self._model,
            self._params,
            slots=self._slots,
            length=self._length,
            chunk=self._chunk,
            cache_dtype=self._cache_dtype,
            speculate=self._speculate,
        )
        programs.warm()
        self._params = programs.params
        self._vocab_size = programs.vocab_size
        self._scheduler = Scheduler(
            programs,
            self._waiting,
            length=self._length,
            speculate=self._speculate,
            reuse=self._reuse,
            ring=self._ring,
        )
        self._thread = threading.Thread(target=self._serve, name="jaxtrain engine", daemon=True)
        self._thread.start()
        # An interpreter that ends while the thread is inside of jax would abort.
        atexit.register(self._end)

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
        if self._thread is None:
            raise EngineDead(_CLOSED if self._closing else "the engine does not run; call start() first")
        self._check(request)
        ticket = Ticket(request, on_event, self._wake)
        with self._changed:
            if self._dead is not None:
                raise EngineDead(self._dead)
            if self._closing:
                raise EngineDead(_CLOSED)
            # Until the next step a request waits whose slot is free, so that what has not ended is counted.
            if self._accepted - self._finished() >= self._slots + self._queue:
                raise EngineFull(
                    f"{self._slots + self._queue} requests run or wait, as many as {self._slots} slots and a queue of "
                    f"{self._queue} take; try again later"
                )
            self._waiting.add(ticket)
            self._accepted += 1
            self._changed.notify()
        return ticket

    def close(self, *, drain: bool = True) -> None:
        """Accept no more requests, and end the thread.

        Args:
            drain: whether the requests that wait or run are finished first; otherwise they end as cancelled.
        """
        self._close(drain, None)
        atexit.unregister(self._end)

    def counters(self) -> EngineCounters:
        """What the engine did since it was started; any thread may ask."""
        scheduler = self._scheduler
        if scheduler is None:
            return EngineCounters(slots=self._slots)
        return replace(
            scheduler.counters, requests=self._accepted, queued=len(self._waiting), compiled=self._compiles.count
        )

    def _finished(self) -> int:
        """How many requests have ended."""
        return 0 if self._scheduler is None else self._scheduler.counters.finished

    @property
    def error(self) -> str | None:
        """Why the engine is dead, in one line; None: it is not."""
        return self._dead

    def _check(self, request: Request) -> None:
        """Raise where a request cannot be served whatever else runs."""
        prompt, size = len(request.tokens), self._vocab_size
        if prompt + request.new_tokens > self._length:
            raise ConfigError(
                f"a prompt of {prompt} tokens and {request.new_tokens} new ones exceed the {self._length} positions of "
                f"the cache; ask for at most {max(self._length - prompt, 0)} new tokens or shorten the prompt"
            )
        largest = max(request.tokens)
        if largest >= size:
            raise ConfigError(
                f"the prompt has token {largest}, but the model's vocabulary has {size}; use 0 to {size - 1}"
            )
        bias_rows([request.sampling], size)

    def _end(self) -> None:
        """What the end of the interpreter does."""
        self._close(False, _ENDING_SECONDS)

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
                with self._changed:
                    self._dead = f"the engine stopped, because a step on its device failed: {reason}"
                    self._closing = True
            with self._changed:  # whoever comes later is refused
                self._closing = True
            scheduler.fail_all("cancelled" if self._dead is None else "failed", self._dead)

    def _waits_for_work(self, scheduler: Scheduler) -> bool:
        """Whether another step is to be taken; waits while there is nothing to do."""
        with self._changed:
            while scheduler.is_idle and not self._closing:
                self._changed.wait()
            return not self._closing or (self._draining and not scheduler.is_idle)


def _check_places(params: Params, sharded_model: ShardedModel) -> None:
    """Raise where parameters are on other devices than the mesh of the model, or on them in another order.

    Raises:
        ConfigError: names the first of them.
    """
    devices = list(sharded_model.mesh.devices.flat)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        # What is not committed to its device follows the others.
        if not isinstance(leaf, jax.Array) or not leaf.committed:
            continue
        are_others = leaf.sharding.device_set != set(devices)
        places = leaf.sharding.mesh.devices if isinstance(leaf.sharding, NamedSharding) else None
        if are_others or (places is not None and list(places.flat) != devices):
            order = "" if are_others else ", in another order"
            raise ConfigError(
                f"Engine: params holds {path_name(path)} on {_devices_text(leaf.sharding.device_set)}, and the model's "
                f"mesh is on {_devices_text(set(devices))}{order}; place them there, before they are quantized: params "
                "= jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, sharded_model.abstract_params))"
            )


def _devices_text(devices: set[Any]) -> str:
    first, *rest = sorted(devices, key=lambda device: device.id)
    return f"{first} and {len(rest)} more" if rest else str(first)


def _decoder_of(sharded_model: ShardedModel) -> Decoder:
    """The decoder that the engine needs.

    Raises:
        ConfigError: the model has none, or reads its prompt with an encoder, or runs on several processes.
    """
    name, decoder = sharded_model.model.name, sharded_model.model.decoder
    if decoder is None:
        raise ConfigError(f"model {name} does not generate text")
    if decoder.encode is not None:
        raise ConfigError(
            f"model {name} reads its prompt with an encoder, which the engine cannot serve; use generate_text"
        )
    if jax.process_count() > 1:
        raise ConfigError(
            f"the engine runs in one process, but this is one of {jax.process_count()}; start it where one process has "
            "all devices of the mesh"
        )
    return decoder


def checked_length(decoder: Decoder, length: Any, *, what: str, equals: str = "=") -> int:
    """How many positions the cache has.

    Args:
        decoder: of the model.
        length: as asked for; None: all that the model has.
        what: the number, for the message.
        equals: what stands between its name and its value there.

    Raises:
        ConfigError: more than the model has, or than its positions allow.
    """
    longest, short = decoder.max_length, decoder.short_length
    if short is not None:
        # One cache serves short and long texts, whose positions would rotate by different frequencies.
        longest = min(longest, short)
    if length is None:
        return longest
    write = f"{what.split()[-1]}{equals}{longest}"
    length = check_whole(length, what=what, least=2, write=write)
    if length > longest:
        why = "" if longest == decoder.max_length else " for texts of the length that it was first trained on"
        raise ConfigError(f"{what}{equals}{length} exceeds the model's {longest} positions{why}; use {write}")
    return length
