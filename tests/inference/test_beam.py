"""Beam search against all continuations that there are, and against greedy choice."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.errors import ConfigError
from jaxtrain.inference.beam import beam_search
from jaxtrain.inference.generate import generate_ids

VOCABULARY, NEW, STOP = 5, 3, 4
PROMPTS = [np.array([1, 2, 3], np.int32), np.array([0, 2], np.int32)]


@pytest.fixture(scope="module")
def sharded() -> Any:
    sizes = dict(kind="transformer", num_layers=1, embed_dim=8, num_heads=2, max_sequence_length=16)
    model = jt.build_model(sizes, input_shape=(16,), vocab_size=VOCABULARY)
    return jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[:1]))


@pytest.fixture(scope="module")
def params(sharded) -> Any:
    params, _ = jax.jit(sharded.init)(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(2), 64))
    return jax.tree.map(lambda leaf: leaf + 0.5 * jax.random.normal(next(keys), leaf.shape), params)


def all_continuations(sharded, params, prompt, penalty) -> list[tuple[float, tuple[int, ...]]]:
    """(score, tokens) of everything that ends at STOP or has NEW tokens, the best first."""
    texts = [*itertools.product(range(VOCABULARY), repeat=NEW)]
    rows = jnp.array([[*prompt, *text] for text in texts])
    logits, _ = sharded.model.apply(params, {}, rows, key=None, train=False)
    log = np.asarray(jax.nn.log_softmax(logits))[:, len(prompt) - 1 : -1]
    found = {}
    for row, text in enumerate(texts):
        count = text.index(STOP) + 1 if STOP in text else NEW
        found[text[:count]] = sum(log[row, at, text[at]] for at in range(count)) / count**penalty
    return sorted(((score, text) for text, score in found.items()), reverse=True)


@pytest.mark.parametrize("penalty", [1.0, pytest.param(0.0, marks=pytest.mark.long)])
def test_as_many_beams_as_beginnings_find_the_best_of_all(sharded, params, penalty):
    found = beam_search(
        sharded, params, PROMPTS, beams=VOCABULARY**2, new_tokens=NEW, stop_tokens={STOP}, length_penalty=penalty
    )
    for row, prompt in enumerate(PROMPTS):
        for place, (score, text) in enumerate(all_continuations(sharded, params, prompt, penalty)[:3]):
            assert tuple(found.tokens[row, place, : found.counts[row, place]].tolist()) == text
            # float32: three log-probabilities of about -2, summed in another order.
            assert found.scores[row, place] == pytest.approx(score, abs=1e-5)


def test_one_beam_is_greedy_choice(sharded, params):
    found = beam_search(sharded, params, PROMPTS, beams=1, new_tokens=NEW)
    greedy = generate_ids(sharded, params, PROMPTS, new_tokens=NEW, sampling=jt.Sampling(temperature=0))
    np.testing.assert_array_equal(found.tokens[:, 0], greedy)


@pytest.mark.parametrize("wrong", [dict(beams=0), dict(new_tokens=0), dict(length_penalty=-1.0)], ids=str)
def test_a_search_that_means_nothing_is_one_line(sharded, params, wrong):
    with pytest.raises(ConfigError, match=f"^beam_search: {next(iter(wrong))} [^\n]*$"):
        beam_search(sharded, params, PROMPTS, **{**dict(beams=2, new_tokens=2), **wrong})
