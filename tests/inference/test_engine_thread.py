"""What the engine does with requests that queue, are cancelled or fail, with programs that compute nothing."""

import dataclasses
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.inference.engine import engine as engine_module
from jaxtrain.inference.engine.engine import Engine, Scheduler
from jaxtrain.inference.engine.programs import Chosen, Chunk
from jaxtrain.inference.engine.request import EngineDead, EngineFull, Request, Ticket
from jaxtrain.inference.sampling import Sampling
from jaxtrain.models.model import Decoder

VOCABULARY = 1000


class CountingPrograms:
    """Programs whose next token is the one before plus 1; every run is written down, and a gate can hold them."""

    def __init__(self, *_: Any, slots: int, chunk: int, **__: Any):
        self.slots, self.chunk, self.vocab_size, self.params = slots, chunk, VOCABULARY, {}
        self.runs: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails, self.keeps_positions = False, True

    def compile(self) -> None:
        pass

    def update(self, params: Any) -> None:
        self.runs.append(f"update {params}")

    def _chosen(self, tokens: np.ndarray, name: str) -> Chosen:
        assert self.gate.wait(20)
        if self.fails:
            raise RuntimeError("the device\nis gone")
        self.runs.append(name)
        nothing = np.zeros((*tokens.shape, 0))
        return Chosen(tokens + 1, np.zeros(tokens.shape), nothing, nothing)

    def decode(self, tokens_S: Any, positions_S: Any, rows: Any, *, wants_top: bool) -> Chosen:
        return self._chosen(tokens_S, "decode")

    def prefill(self, chunk: Chunk) -> Chosen:
        return self._chosen(chunk.tokens_C[-1:], f"prefill {chunk.slot}")


def request(first: int = 1, length: int = 1, new_tokens: int = 3, **given: Any) -> Request:
    return Request(tuple(range(first, first + length)), new_tokens, Sampling(temperature=0), **given)


@pytest.fixture(scope="module")
def sharded_model() -> jt.ShardedModel:
    """A model of which nothing is computed."""
    model = jt.Model("counts", lambda key: ({}, {}), lambda params, state, inputs, *, key, train: (inputs, state))

    def decode(*_: Any) -> Any:
        raise AssertionError("nothing is computed")

    decoder = Decoder(lambda *_: {}, decode, max_length=64)
    return jt.shard_model(dataclasses.replace(model, decoder=decoder), mesh=jt.make_mesh(devices=jax.devices()[:1]))


@pytest.fixture
def engine(monkeypatch, sharded_model):
    """An engine of two slots and a queue of two, on programs that count."""
    made: list[CountingPrograms] = []

    def make(*args: Any, **given: Any) -> CountingPrograms:
        made.append(CountingPrograms(*args, **given))
        return made[-1]

    monkeypatch.setattr(engine_module, "Programs", make)
    engine = Engine(sharded_model, {}, slots=2, chunk=4, queue=2)
    engine.start()
    yield engine, made[0]
    made[0].gate.set()
    engine.close(drain=False)


def until(condition: Any) -> None:
    """Wait for another thread; a failure is the timeout's."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_ticket_gives_tokens_and_events_in_order(engine):
    engine, _ = engine
    events: list[Any] = []
    ticket = engine.submit(request(5), lambda ticket, event: events.append(event))
    assert [one.token for one in ticket] == [6, 7, 8]
    assert [event and event.token for event in events] == [6, 7, 8, None]
    assert ticket.finish_reason == "length"
    assert list(ticket) == []  # a second iteration ends


def test_answers_go_on_while_a_long_prompt_is_read():
    programs: Any = CountingPrograms(slots=2, chunk=4)
    waiting: deque[Ticket] = deque()
    scheduler = Scheduler(programs, waiting)
    waiting.append(Ticket(request(1, new_tokens=20)))
    scheduler.step()
    programs.runs.clear()
    waiting.append(Ticket(request(100, length=12)))
    for _ in range(3):
        scheduler.step()
    assert programs.runs == ["prefill 1", "decode"] * 3


def test_a_full_queue_refuses_and_a_cancelled_request_frees_its_place(engine):
    engine, programs = engine
    programs.gate.clear()
    running = [engine.submit(request(10 * index)) for index in (1, 2)]
    until(lambda: engine.counters().queued == 0)
    queued = [engine.submit(request(10 * index)) for index in (3, 4)]
    with pytest.raises(EngineFull, match="4 requests are running or waiting"):
        engine.submit(request(50))
    queued[0].cancel()
    running[0].cancel("stop")
    programs.gate.set()
    assert [len(list(ticket)) for ticket in (queued[0], running[1], queued[1])] == [0, 3, 3]
    list(running[0])
    assert [ticket.finish_reason for ticket in (*running, *queued)] == ["stop", "length", "cancelled", "length"]
    assert engine.counters().slots_in_use == 0


@pytest.mark.parametrize("drain", [True, False], ids=["finishes", "cancels"])
def test_closing_finishes_what_runs_or_cancels_it(engine, drain):
    engine, programs = engine
    programs.gate.clear()
    tickets = [engine.submit(request(10 * index, new_tokens=40)) for index in (1, 2)]
    until(lambda: engine.counters().queued == 0)
    tickets.append(engine.submit(request(30)))
    threading.Timer(0.05, programs.gate.set).start()
    engine.close(drain=drain)
    for ticket in tickets:
        assert (len(list(ticket)) == ticket.request.new_tokens) == drain
        assert ticket.finish_reason == ("length" if drain else "cancelled")
    with pytest.raises(EngineDead, match="closed"):
        engine.submit(request(1))


def test_a_device_that_fails_ends_every_request_in_one_line(engine):
    engine, programs = engine
    programs.gate.clear()
    tickets = [engine.submit(request(10 * index)) for index in (1, 2)]
    until(lambda: engine.counters().queued == 0)
    tickets.append(engine.submit(request(30)))
    programs.fails = True
    programs.gate.set()
    for ticket in tickets:
        with pytest.raises(EngineDead, match="a step on its device failed: RuntimeError: the device is gone") as caught:
            list(ticket)
        assert ticket.finish_reason == "failed"
        assert "\n" not in str(caught.value)
    with pytest.raises(EngineDead, match="the device is gone"):
        engine.submit(request(1))


def test_new_parameters_are_refused_while_a_request_waits_or_runs(engine):
    engine, programs = engine
    programs.gate.clear()
    tickets = [engine.submit(request(10 * index)) for index in (1, 2, 3)]
    with pytest.raises(EngineFull, match="requests are running or waiting; update"):
        engine.update("new")
    programs.gate.set()
    for ticket in tickets:
        assert len(list(ticket)) == 3
    engine.update("new")
    assert programs.runs[-1] == "update new"
    engine.close()
    with pytest.raises(EngineDead, match="closed"):
        engine.update("newer")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(tokens=()), "at least one token"),
        (dict(tokens=(VOCABULARY,)), "ids from 0 to 999"),
        (dict(tokens=(1,) * 64), "at most 64 together"),
        (dict(new_tokens=0), "use 1 or more new tokens"),
        (dict(top=21), "top from 0 to 20"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_served_is_one_line(engine, wrong, words):
    engine, _ = engine
    with pytest.raises(jt.ConfigError, match=words):
        engine.submit(dataclasses.replace(request(), **wrong))


LEFT_OPEN = """
import jax
import jaxtrain as jt

sizes = dict(kind="transformer", num_layers=1, embed_dim=16, num_heads=2, max_sequence_length=4096)
model = jt.build_model(sizes, input_shape=(4096,), vocab_size=62)
sharded = jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[:1]))
engine = jt.Engine(sharded, jax.jit(sharded.init)(jax.random.key(0))[0], slots=1)
engine.start()
next(iter(engine.submit(jt.Request((1, 2), 4000, jt.Sampling(temperature=0)))))
"""


@pytest.mark.long
def test_a_program_may_end_with_an_engine_at_work():
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
