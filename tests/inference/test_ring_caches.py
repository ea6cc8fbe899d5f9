"""Layers with a window keep the window alone, and write what full forward passes write."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.inference.decoding import generate_ids
from jaxtrain.inference.engine.scheduler import Slot, kept_prefix
from jaxtrain.models.ring_cache import Ring, can_go_on, make_cache, ring_of
from jaxtrain.models.shipped import block, transformer

VOCABULARY, WINDOW, LENGTH, NEW = 40, 5, 64, 24
SMALL = dict(
    kind="transformer", num_layers=3, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24, max_sequence_length=LENGTH
)  # fmt: skip
KINDS = {
    "all layers see a window": dict(sliding_window=WINDOW),
    "local and global layers": dict(local_layers=dict(pattern=[1, 0], window=WINDOW, rope_theta=100.0)),
    "local layers alone": dict(local_layers=dict(pattern=[1], window=WINDOW)),
}
GREEDY = jt.Sampling(temperature=0)
# Shorter than the window, equal to it, longer, and of several windows.
PROMPTS = [
    np.random.default_rng(length).integers(0, VOCABULARY, length).astype(np.int32) for length in (2, WINDOW, 9, 37)
]


def drawn(mesh: Any = None, **changed: Any) -> tuple[jt.ShardedModel, Any]:
    """A small model whose kernels are large enough that a wrong key shows in the tokens."""
    model = jt.build_model({**SMALL, **changed}, input_shape=(LENGTH,), vocab_size=VOCABULARY)
    sharded = jt.shard_model(model, mesh=mesh or jt.make_mesh(devices=jax.devices()[:1]))
    params, keys = jax.jit(sharded.init)(jax.random.key(0))[0], iter(jax.random.split(jax.random.key(1), 64))
    return sharded, jax.tree.map(lambda leaf: leaf + 0.4 * jax.random.normal(next(keys), leaf.shape), params)


def without_rings(sharded: jt.ShardedModel) -> jt.ShardedModel:
    decoder = dataclasses.replace(sharded.model.decoder, windows=None)
    return dataclasses.replace(sharded, model=dataclasses.replace(sharded.model, decoder=decoder))


def greedy_tokens(sharded: jt.ShardedModel, params: Any, prompts: list[np.ndarray], new: int) -> np.ndarray:
    """By full forward passes, without a cache."""
    text, lengths = np.zeros((len(prompts), LENGTH), np.int32), np.array([len(prompt) for prompt in prompts])
    for row, prompt in enumerate(prompts):
        text[row, : len(prompt)] = prompt
    rows, found = np.arange(len(prompts)), []

    def next_tokens(text: Any, at: Any) -> Any:
        logits = sharded.apply(params, {}, text, key=None, train=False)[0]
        return logits[rows, at - 1].argmax(-1)

    jitted = jax.jit(next_tokens)
    for step in range(new):
        found.append(np.asarray(jitted(text, lengths + step)))
        text[rows, lengths + step] = found[-1]
    return np.stack(found, 1)


TEXTS = {
    "local and global layers, prompts in chunks": ("local and global layers", 4),
    "all layers see a window, prompts in chunks": ("all layers see a window", 4),
    "local layers alone": ("local layers alone", None),
}


@pytest.mark.long
@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_several_windows_are_those_of_full_passes(name, monkeypatch):
    """Also where prompts are read in chunks, of which a short prompt's are padding that a ring has no room for."""
    kind, chunk = TEXTS[name]
    if chunk is not None:
        monkeypatch.setattr(transformer, "PREFILL_CHUNK", chunk)
        # Of the 8 places of a ring blocks of 3, the last of which overlaps the one before it.
        monkeypatch.setattr(block, "BLOCK", 3)
    sharded, params = drawn(**KINDS[kind])
    padded = 64 - NEW  # positions that the model has for prompts
    assert ring_of(sharded.model.decoder, padded + NEW, chunk or padded) == Ring(WINDOW + (chunk or padded) - 1, WINDOW)
    wanted = greedy_tokens(sharded, params, PROMPTS, NEW)
    np.testing.assert_array_equal(generate_ids(sharded, params, PROMPTS, new_tokens=NEW, sampling=GREEDY), wanted)


@pytest.mark.long
def test_a_ring_of_8_bits_writes_what_whole_caches_write():
    """int8 rounds each position by itself, so that both caches hold the same numbers."""
    sharded, params = drawn(**KINDS["local and global layers"])
    found, wanted = (
        generate_ids(one, params, PROMPTS, new_tokens=NEW, sampling=GREEDY, cache_dtype="int8")
        for one in (sharded, without_rings(sharded))
    )
    np.testing.assert_array_equal(found, wanted)


def request(tokens: Any, new_tokens: int = 12, **given: Any) -> jt.Request:
    return jt.Request(tuple(int(token) for token in tokens), new_tokens, GREEDY, **given)


@pytest.mark.long
def test_slots_with_prefixes_write_what_full_passes_write():
    """Rings are handed on from text to text, and are reused only as far as they still hold the window."""
    sharded, params = drawn(**KINDS["local and global layers"])
    random = np.random.default_rng(3)
    shared = random.integers(0, VOCABULARY, 24)
    # Texts that begin alike, repeat themselves go on, and go back.
    prompts = [np.concatenate([shared[:cut], random.integers(0, VOCABULARY, 4)]) for cut in (24, 20, 8, 24)]
    prompts += [np.tile(shared[:3], 9), np.tile(shared[:2], 4), *PROMPTS]
    wanted = greedy_tokens(sharded, params, prompts, 20)
    with jt.Engine(sharded, params, slots=2, chunk=4) as engine:
        tickets = [engine.submit(request(prompt, 20)) for prompt in prompts]
        found = [[one.token for one in ticket] for ticket in tickets]
        np.testing.assert_array_equal(found, wanted)
        # A chat that goes on finds all of its text, although most of it is overwritten in the rings.
        text = [*prompts[0], *wanted[0]]
        first = list(engine.submit(request(text, 4)))
        chat = [*text, *(one.token for one in first), 1, 2]
        ticket = engine.submit(request(chat, 8))
        np.testing.assert_array_equal(
            [one.token for one in ticket], greedy_tokens(sharded, params, [np.array(chat)], 8)[0]
        )
        assert ticket.cached_tokens >= len(text)
        # One that goes back by more than a ring holds is read again.
        ticket = engine.submit(request([*chat[:20], 3], 4))
        np.testing.assert_array_equal(
            [one.token for one in ticket], greedy_tokens(sharded, params, [np.array([*chat[:20], 3])], 4)[0]
        )
        assert ticket.cached_tokens == 0
        counters = engine.counters()
    assert counters.compiled == 0


@pytest.mark.parametrize(("window", "chunk"), [(1, 1), (3, 4)])
def test_a_text_goes_on_exactly_where_its_window_is_left(window, chunk):
    """Against a list of the positions that each place was last given."""
    ring = Ring(window + chunk - 1, window)
    for written in range(1, 4 * ring.size):
        places: dict[int, int] = {position % ring.size: position for position in range(written)}
        for position in range(written + 1):
            seen = range(max(0, position - window + 1), position)
            is_there = all(places[before % ring.size] == before for before in seen)
            # What stands behind the position counts as what stood there a ring before; see `ring_positions`.
            hidden = all(old - ring.size < max(0, position - window + 1) for old in range(position, written))
            assert can_go_on(ring, position, written) == (position == 0 or (is_there and hidden)), (position, written)


def test_a_row_lends_only_what_its_rings_hold():
    text, ring = list(range(40)), Ring(16, 8)
    for end, shared, kept in ((40, 40, 40), (40, 34, 34), (40, 31, 31), (40, 30, 0), (12, 5, 5)):
        slot = Slot(0, ring)
        slot.read(text[:end])
        assert kept_prefix(slot, [*text[:shared], 99]) == kept


# Bytes of a cached row of 32,768 positions in bfloat16 that an engine with chunks of 128 writes: layers, keys and
# values, heads, numbers of a head, 2 bytes.
WINDOWED_7B, WHOLE_7B = 32 * 2 * 8 * 128 * 2 * (4096 + 127), 32 * 2 * 8 * 128 * 2 * 32768
ROW_BYTES = {
    "mistral_7b_v0.1": (WINDOWED_7B, WHOLE_7B),
    # 4 of 26 layers see all.
    "gemma3_1b": (2 * 256 * 2 * (22 * (512 + 127) + 4 * 32768), 26 * 2 * 256 * 2 * 32768),
    # No layer has a window.
    "mistral_7b_v0.3": (WHOLE_7B, WHOLE_7B),
}


@pytest.mark.parametrize("size", ROW_BYTES)
def test_a_cache_takes_the_bytes_of_what_is_seen(size):
    decoder = jt.build_model(dict(kind="transformer", size=size), input_shape=(64,)).decoder
    caches = (
        lambda: make_cache(decoder, 1, 32768, jnp.bfloat16, chunk=128),
        lambda: decoder.init_cache(1, 32768, jnp.bfloat16),
    )
    found = (sum(leaf.size * leaf.dtype.itemsize for leaf in jax.eval_shape(cache).values()) for cache in caches)
    assert tuple(found) == ROW_BYTES[size]
