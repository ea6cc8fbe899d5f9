"""Longrope chooses factors by the length of a document, whatever row it is in. Shapes: B rows, L length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.rope import LongRope
from jaxtrain.models.rotary import long_documents
from jaxtrain.models.shipped.build import build_model

ORIGINAL = 6
SCALING = LongRope(short_factors=(1.0, 1.1), long_factors=(3.0, 5.0), original_length=ORIGINAL)
# The second document is longer than the original length, the others and all padding together are not.
SIZES, ROW = (4, 9, 6), 26


@pytest.fixture(scope="module")
def logits():
    sizes = dict(kind="transformer", num_layers=2, embed_dim=16, num_heads=4, mlp_dim=16, vocab_size=20)
    model = build_model({**sizes, "max_sequence_length": 64, "rope_scaling": SCALING.model_dump()}, input_shape=(ROW,))
    drawn, _ = model.init(jax.random.key(0))
    params = jax.tree.map(lambda p: p + 0.2 * jax.random.normal(jax.random.key(p.size), p.shape), drawn)
    apply = jax.jit(lambda inputs: model.apply(params, {}, inputs, key=None, train=False)[0])
    return lambda inputs: np.asarray(apply(inputs))


TOKENS = [np.random.default_rng(n).integers(0, 20, (1, n)).astype(np.int32) for n in SIZES]


def test_documents_of_a_packed_row_are_those_of_separate_rows(logits):
    left = ROW - sum(SIZES)
    packed = {
        "tokens": np.concatenate([*TOKENS, np.zeros((1, left), np.int32)], axis=1),
        "segments": np.repeat([1, 2, 3, 0], [*SIZES, left])[None].astype(np.int32),
        "positions": np.concatenate([np.arange(n) for n in (*SIZES, left)])[None].astype(np.int32),
    }
    found, at = logits(packed), 0
    for tokens in TOKENS:
        here, at = found[:, at : at + tokens.shape[1]], at + tokens.shape[1]
        np.testing.assert_allclose(here, logits(tokens), atol=1e-5)  # sums in another order, of values up to 3


def test_a_padded_row_is_the_text_alone(logits):
    for tokens in TOKENS:
        size = tokens.shape[1]
        padded = np.pad(tokens, ((0, 0), (0, ROW - size)))
        found = logits({"tokens": padded, "segments": (np.arange(ROW) < size)[None].astype(np.int32)})
        np.testing.assert_allclose(found[:, :size], logits(tokens), atol=1e-5)


def test_long_documents_are_found_wherever_their_positions_begin():
    random = np.random.default_rng(0)
    sizes_BS = random.multinomial(30, [0.2] * 5, size=16)
    segments_BL = np.stack([np.repeat([2, 0, 1, 7, 0], sizes) for sizes in sizes_BS])
    starts_BS = random.integers(0, ORIGINAL // 2, sizes_BS.shape)
    positions_BL = np.stack(
        [
            np.concatenate([start + np.arange(size) for start, size in zip(*row, strict=True)])
            for row in zip(starts_BS, sizes_BS, strict=True)
        ]
    )
    found_BL = long_documents(SCALING, jnp.asarray(positions_BL), jnp.asarray(segments_BL))
    assert found_BL is not None
    longest_BL = [[max(p[s == one]) if one else 0 for one in s] for p, s in zip(positions_BL, segments_BL, strict=True)]
    # Of 0 there are two runs, both padding.
    np.testing.assert_array_equal(found_BL, np.array(longest_BL) >= ORIGINAL)
    assert 0 < np.mean(found_BL) < 1


def test_short_rows_and_rows_of_one_document_are_decided_without_a_look_at_them():
    ids = jnp.ones((2, ORIGINAL), jnp.int32)
    assert long_documents(SCALING, ids, ids) is None
    assert long_documents(SCALING, jnp.ones((2, 99), jnp.int32), None) is None
