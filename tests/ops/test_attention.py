"""Attention and its masks against loops in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops.attention.reference import attention, attention_mask


def naive(q, k, v, mask):
    """One query, one head at a time, in float64; a query that sees nothing is left NaN."""
    batch, length, heads, head_dim = q.shape
    repeat = heads // k.shape[2]
    out = np.full(q.shape, np.nan)
    for b, t, h in np.ndindex(batch, length, heads):
        seen = [s for s in range(k.shape[1]) if mask[b if mask.shape[0] > 1 else 0, t, s]]
        if seen:
            scores = np.array([q[b, t, h] @ k[b, s, h // repeat] / np.sqrt(head_dim) for s in seen])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[b, t, h] = sum(w * v[b, s, h // repeat] for w, s in zip(weights, seen, strict=True))
    return out


def arrays(*, heads, groups, length=5, keys=5, scale=1.0):
    rng = np.random.default_rng(1)
    q = rng.normal(size=(2, length, heads, 4)) * scale
    k, v = (rng.normal(size=(2, keys, groups, 4)) for _ in range(2))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


ORDER = np.arange(5)[None]
SEGMENTS = np.array([[0, 0, 0, 1, 1], [0, 1, 1, 2, 2]])

# heads, groups, scale of the scores, mask
CASES = {
    "causal": (4, 4, 1.0, lambda: attention_mask(ORDER, ORDER, causal=True)),
    "full": (4, 4, 1.0, lambda: attention_mask(ORDER, ORDER, causal=False)),
    "grouped": (4, 2, 1.0, lambda: attention_mask(ORDER, ORDER, causal=True)),
    "one key-value head": (4, 1, 1.0, lambda: attention_mask(ORDER, ORDER, causal=True)),
    "segments": (
        4,
        2,
        1.0,
        lambda: attention_mask(
            ORDER, ORDER, causal=True, query_segments_BL=jnp.asarray(SEGMENTS), key_segments_BS=jnp.asarray(SEGMENTS)
        ),
    ),
    "large scores": (2, 2, 1e4, lambda: attention_mask(ORDER, ORDER, causal=True)),
}


@pytest.mark.parametrize(("heads", "groups", "scale", "mask"), CASES.values(), ids=CASES)
def test_attention_is_the_naive_loop(heads, groups, scale, mask):
    q, k, v = arrays(heads=heads, groups=groups, scale=scale)
    found = jax.jit(attention)(q, k, v, mask())
    # fp32 against float64; scores of 1e4 carry an absolute error of 1e-3, which moves weights that are not 0 or 1.
    np.testing.assert_allclose(found, naive(q, k, v, np.asarray(mask())), atol=2e-6 if scale == 1 else 2e-2)


def test_attention_gradients_are_those_of_the_plain_formula():
    q, k, v = arrays(heads=4, groups=2)
    mask = attention_mask(ORDER, ORDER, causal=True)

    def plain(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.where(mask[:, None], jnp.einsum("blhk,bshk->bhls", q, k) / 2.0, -jnp.inf)
        return jnp.einsum("bhls,bshk->blhk", jax.nn.softmax(scores), v)

    def loss(fn):
        return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(fn(*args))), (0, 1, 2)))(q, k, v)

    for found, expected in zip(loss(lambda q, k, v: attention(q, k, v, mask)), loss(plain), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)  # fp32 rounding of sums of 5


def test_a_query_that_sees_nothing_is_finite_and_leaves_the_others_alone():
    q, k, v = arrays(heads=2, groups=2)
    mask = np.array(attention_mask(ORDER, ORDER, causal=True))
    mask[:, 2] = False

    def run(q, k, v):
        return jnp.sum(out := attention(q, k, v, mask)), out

    gradients, found = jax.jit(jax.grad(run, (0, 1, 2), has_aux=True))(q, k, v)
    assert np.all(np.isfinite(found))
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    expected = naive(q, k, v, mask)
    np.testing.assert_allclose(np.delete(found, 2, 1), np.delete(expected, 2, 1), atol=2e-6)  # fp32 rounding


def test_softmax_is_float32_under_bf16():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in arrays(heads=4, groups=2))
    with jax.numpy_dtype_promotion("strict"):
        found = attention(q, k, v, attention_mask(ORDER, ORDER, causal=True))
    assert found.dtype == jnp.bfloat16
    expected = naive(
        *(np.asarray(x, np.float64) for x in (q, k, v)), np.asarray(attention_mask(ORDER, ORDER, causal=True))
    )
    # One rounding to 8 bits of the weights and one of the result, values up to 3.
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=2e-2)


# query positions, key positions, causal, query segments, key segments, mask
MASKS = {
    "causal": ([0, 1, 2], [0, 1, 2], True, None, None, ["100", "110", "111"]),
    "full": ([0, 1], [0, 1], False, None, None, ["11", "11"]),
    "cache": ([3, 4], [0, 1, 2, 3, 4, 5], True, None, None, ["111100", "111110"]),
    "segments": ([0, 1, 2], [0, 1, 2], True, [0, 0, 1], [0, 0, 1], ["100", "110", "001"]),
    "segments without order": ([0, 1, 2], [0, 1, 2], False, [0, 0, 1], [0, 0, 1], ["110", "110", "001"]),
}


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "query_segments", "key_segments", "mask"), MASKS.values(), ids=MASKS
)
def test_masks(queries, keys, causal, query_segments, key_segments, mask):
    def row(values):
        return None if values is None else jnp.asarray([values])

    found = attention_mask(
        row(queries),
        row(keys),
        causal=causal,
        query_segments_BL=row(query_segments),
        key_segments_BS=row(key_segments),
    )
    assert ["".join("1" if seen else "0" for seen in line) for line in np.asarray(found[0])] == mask
