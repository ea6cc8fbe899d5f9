"""Scores of continuations, against log-softmax and argmax of logits, row by row in NumPy."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.errors import DataError
from jaxtrain.inference.likelihood import LikelihoodScorer

LENGTH = 24
LONG = pytest.mark.long


@pytest.fixture(scope="module", params=[pytest.param(1, id="one device"), pytest.param(4, id="data=4", marks=LONG)])
def sharded(request):
    model = jt.build_model(
        {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": LENGTH},
        input_shape=(LENGTH,),
        vocab_size=256,
    )
    return jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[: request.param]))


@pytest.fixture(scope="module")
def params(sharded):
    return jax.jit(sharded.init)(jax.random.key(3))[0]


@pytest.fixture(scope="module")
def log_softmax(sharded, params):
    """ids -> log-probabilities of the next token after each, float64 [length, 256], of one row."""
    forward = jax.jit(lambda row: sharded.model.apply(params, {}, row, key=None, train=False)[0])

    def compute(ids):
        # One shape to compile, filled up with other ids than batches are.
        row = np.full((1, LENGTH), 77, np.int32)
        row[0, : len(ids)] = ids
        logits = np.asarray(forward(row), np.float64)[0, : len(ids)]
        return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))

    return compute


CONTINUATIONS = {
    "a word": (b"To be or", b" not"),
    "one token": (b"T", b"o"),
    "as long as the model": (b"x" * 14, b"y" * 10 + b"z"),
    "the context loses its beginning": (b"The quick brown fox jumps over", b" the dog"),
    "a continuation of all positions": (b"abc", b"d" * LENGTH),
}


@pytest.mark.parametrize("batch_size", [None, 3])
def test_scores_are_those_of_single_rows(sharded, params, log_softmax, batch_size):
    scorer = LikelihoodScorer(sharded, batch_size=batch_size)
    pairs = [([*context], [*continuation]) for context, continuation in CONTINUATIONS.values()]
    scores = scorer(params, {}, pairs)
    for (name, (context, continuation)), (score, is_greedy) in zip(CONTINUATIONS.items(), scores, strict=True):
        ids = [*context, *continuation][-(LENGTH + 1) :]
        logs = log_softmax(ids[:-1])[-len(continuation) :]
        expected = logs[np.arange(len(continuation)), [*continuation]].sum()
        # Sums of float32 numbers of about 5 in another order.
        assert score == pytest.approx(expected, rel=1e-5), name
        assert is_greedy == bool((logs.argmax(-1) == [*continuation]).all()), name


def test_short_rows_of_a_model_with_two_lengths_are_not_padded_to_long_ones():
    """A text of longrope rotates by other frequencies from `short_length` on."""
    scaling = {"kind": "longrope", "original_length": 40, "short_factors": [1.0] * 4, "long_factors": [2.0] * 4}
    group = {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "vocab_size": 256}
    model = jt.build_model({**group, "max_sequence_length": 128, "rope_scaling": scaling}, input_shape=(128,))
    scorer = LikelihoodScorer(jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[:1])))
    lengths = [5, 100, 3, 40, 33, 41, 64]
    continuations = [([1] * length, [1]) for length in lengths]
    by_shape = {(128, 8): [1], (64, 8): [5, 6], (40, 8): [3, 4], (32, 8): [0, 2]}
    assert scorer.by_shape(continuations) == by_shape


@pytest.mark.parametrize("count", [0, LENGTH + 1])
def test_what_has_no_score_is_one_line(sharded, params, count):
    with pytest.raises(DataError, match=rf"^a continuation of {count} tokens cannot be scored; it must have 1 to 24"):
        LikelihoodScorer(sharded)(params, {}, [([1], [2] * count)])
