"""The engine gives each request what it would get alone, and compiles nothing after its start."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.inference.engine.engine import Engine
from jaxtrain.inference.engine.request import Request
from jaxtrain.inference.sampling import Sampling, choose_rows, row_sampling

LENGTH, VOCABULARY = 64, 62
SMALL = {
    "kind": "transformer",
    "num_layers": 2,
    "embed_dim": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_sequence_length": LENGTH,
}
GREEDY = Sampling(temperature=0)
SAMPLINGS = (
    GREEDY,
    GREEDY,
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.2, top_p=0.8),
    Sampling(temperature=0.9, min_p=0.05),
    Sampling(temperature=0, repetition_penalty=1.5),
    Sampling(temperature=0.8, presence_penalty=1.0, frequency_penalty=-0.5),
    Sampling(temperature=1.0, repetition_penalty=0.8),
)


def sharded(**changed: Any) -> tuple[jt.ShardedModel, Any]:
    """A small model on one device, with parameters that make its next tokens far from equally likely."""
    model = jt.build_model({**SMALL, **changed}, input_shape=(LENGTH,), vocab_size=VOCABULARY)
    sharded_model = jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[:1]))
    params, keys = jax.jit(sharded_model.init)(jax.random.key(0))[0], iter(jax.random.split(jax.random.key(1), 64))
    return sharded_model, jax.tree.map(lambda leaf: leaf + 0.4 * jax.random.normal(next(keys), leaf.shape), params)


@contextlib.contextmanager
def compiled_on(*threads: str) -> Iterator[list[str]]:
    """Collect what threads of these names compile, or read from the cache of compiled programs, inside."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and threading.current_thread().name in threads:
            compiled.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class Alone:
    """Each request by itself: full forward passes of its text, without cache, slots or chunks."""

    def __init__(self, sharded_model: jt.ShardedModel, params: Any):
        def next_token(params: Any, text: Any, at: Any, row: Any, counts: Any) -> tuple[Any, Any]:
            logits_BLV = sharded_model.apply(params, {}, text[None], key=None, train=False)[0]
            logits_BLV = logits_BLV["logits"] if isinstance(logits_BLV, dict) else logits_BLV
            last_1V = logits_BLV[0, at - 1][None]
            prompt, output = counts[:1], counts[1:]
            token = choose_rows(last_1V, row, at[None], prompt_counts_SV=prompt, output_counts_SV=output)
            return token[0], jax.nn.log_softmax(logits_BLV[0].astype(jnp.float32))

        self._next, self._params = jax.jit(next_token), params

    def __call__(self, request: Request) -> tuple[list[int], list[float], np.ndarray]:
        """The answer, its log-probabilities, and those of every token at every position of the text."""
        text, counts = np.zeros(LENGTH, np.int32), np.zeros((2, VOCABULARY), np.int32)
        begin = len(request.tokens)
        text[:begin] = request.tokens
        np.add.at(counts[0], list(request.tokens), 1)
        row = row_sampling([request.sampling], [request.seed], [request.row])
        tokens, log_probabilities, table = [], [], np.zeros(0)
        for at in range(begin, begin + request.new_tokens):
            token, table = jax.device_get(self._next(self._params, text, np.int32(at), row, counts))
            text[at] = token
            counts[1, token] += 1
            tokens.append(int(token))
            log_probabilities.append(float(table[at - 1, token]))
            if tokens[-1] in request.stop_tokens:
                break
        return tokens, log_probabilities, table


def random_requests(number: int, seed: int) -> list[Request]:
    """Prompts of all lengths, some of which repeat themselves or begin alike, under every kind of sampling."""
    random = np.random.default_rng(seed)
    shared = random.integers(0, VOCABULARY, 24).tolist()
    requests = []
    for index in range(number):
        length = int(random.integers(1, 45))
        tokens = random.integers(0, VOCABULARY, length).tolist()
        if index % 3 == 0:
            tokens = (shared + tokens)[:45]
        elif index % 5 == 0:
            tokens = (tokens[:4] * 12)[:45]
        requests.append(
            Request(
                tuple(tokens),
                new_tokens=int(random.integers(1, 20)),
                sampling=SAMPLINGS[index % len(SAMPLINGS)],
                seed=int(random.integers(0, 1000)),
                row=index % 3,
                stop_tokens=frozenset({int(random.integers(0, VOCABULARY))} if index % 4 == 0 else ()),
            )
        )
    return requests


@pytest.fixture(scope="module")
def model() -> tuple[jt.ShardedModel, Any]:
    return sharded()


@pytest.fixture(scope="module")
def alone(model) -> Alone:
    return Alone(*model)


@pytest.fixture(scope="module")
def engine(model) -> Iterator[Engine]:
    with Engine(*model, slots=3, chunk=8) as engine:
        yield engine


def check_like_alone(engine: Engine, alone: Any, requests: list[Request], *, threads: int) -> None:
    """Ask for all of them from several threads at a time, and compare token for token."""
    tickets: dict[int, Any] = {}
    answers: dict[int, list[Any]] = {}

    def submit(start: int) -> None:
        for index in range(start, len(requests), threads):
            tickets[index] = engine.submit(requests[index])
            if index % 7 == 0:  # others arrive while this one's thread waits
                answers[index] = list(tickets[index])

    workers = [threading.Thread(target=submit, args=(start,)) for start in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for index, request in enumerate(requests):
        found = answers.get(index) or list(tickets[index])
        wanted, log_probabilities, _ = alone(request)
        assert [one.token for one in found] == wanted, (index, request)
        assert tickets[index].finish_reason == ("stop" if wanted[-1] in request.stop_tokens else "length")
        # float32 sums in another order: about 1e-5 of logits of some tens.
        np.testing.assert_allclose([one.log_probability for one in found], log_probabilities, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("count", "threads"), [pytest.param(20, 4, id="20"), pytest.param(200, 7, id="200", marks=pytest.mark.long)]
)
def test_a_request_gets_what_it_would_get_alone(engine, alone, count, threads):
    """Whatever its slot, its neighbours, and what was in the slot before."""
    with compiled_on("jaxtrain engine") as compiled:
        check_like_alone(engine, alone, random_requests(count, seed=0), threads=threads)
    assert compiled == []
    counters = engine.counters()
    assert counters.finished == counters.requests
    assert (counters.slots_in_use, counters.queued) == (0, 0)


def test_alternatives_have_the_log_probabilities_of_a_forward_pass(engine, alone):
    request = Request(tuple(range(5, 24)), new_tokens=3, sampling=GREEDY, top=4)  # three chunks
    answer = list(engine.submit(request))
    tokens, _, table_LV = alone(request)
    assert [one.token for one in answer] == tokens
    for at, one in enumerate(answer, len(request.tokens) - 1):
        # float32 sums in another order: about 1e-5 of logits of some tens.
        best = np.sort(table_LV[at])[::-1][:4]
        np.testing.assert_allclose([number for _, number in one.top], best, rtol=0, atol=1e-3)
        np.testing.assert_allclose([table_LV[at, token] for token, _ in one.top], best, rtol=0, atol=1e-3)


def test_a_chat_that_goes_on_is_not_read_again(engine):
    first = Request(tuple(range(30, 55)), new_tokens=6, sampling=GREEDY)
    answer = [one.token for one in engine.submit(first)]
    ticket = engine.submit(Request((*first.tokens, *answer, 1, 2), new_tokens=2, sampling=GREEDY))
    assert len(list(ticket)) == 2
    # All but the last token of the answer, which nothing was computed after.
    assert ticket.cached_tokens == len(first.tokens) + len(answer) - 1


def test_after_an_update_answers_are_those_of_the_new_parameters(model, alone):
    """Those of a train step, which takes over the arrays of its state afterwards."""
    sharded_model, params = model
    step = jt.make_train_step(sharded_model.model, jt.language_modeling(), optax.sgd(0.1), mesh=sharded_model.mesh)
    former = jax.tree.map(lambda leaf: leaf * 0.5, params)
    requests = random_requests(3, seed=4)
    with Engine(step, former, slots=3, chunk=8) as engine:
        jax.tree.map(lambda leaf: leaf.delete(), former)  # as the next step does
        first = [[one.token for one in engine.submit(request)] for request in requests]
        latest = jax.tree.map(jnp.copy, params)
        with compiled_on(threading.current_thread().name, "jaxtrain engine") as compiled:
            engine.update(latest)
            jax.tree.map(lambda leaf: leaf.delete(), latest)
            tickets = [engine.submit(request) for request in requests]
            assert [[one.token for one in ticket] for ticket in tickets] != first
        assert compiled == []
        assert [ticket.cached_tokens for ticket in tickets] == [0] * 3
        check_like_alone(engine, alone, requests, threads=1)


def test_an_update_of_parameters_that_are_shared_compiles_nothing(engine, model):
    with compiled_on(threading.current_thread().name, "jaxtrain engine") as compiled:
        engine.update(model[1])
        assert len(list(engine.submit(random_requests(1, seed=4)[0]))) > 0
    assert compiled == []


@pytest.mark.long
def test_a_sharded_engine_gives_what_one_device_gives(model, alone):
    whole, params = model
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2, devices=jax.devices()[:8])
    sharded_model = jt.shard_model(whole.model, mesh=mesh)
    placed = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, sharded_model.abstract_params))
    with Engine(sharded_model, placed, slots=4, chunk=8) as engine:
        with compiled_on("jaxtrain engine") as compiled:
            check_like_alone(engine, alone, random_requests(12, seed=3), threads=3)
        assert compiled == []
