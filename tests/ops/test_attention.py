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


def naive_gradients(q, k, v, mask, weight):
    """Of the sum of outputs times `weight`, in float64."""
    batch, length, heads, head_dim = q.shape
    repeat = heads // k.shape[2]
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    for b, t, h in np.ndindex(batch, length, heads):
        g, seen = h // repeat, np.flatnonzero(mask[b if mask.shape[0] > 1 else 0, t])
        if not len(seen):
            continue
        scores = k[b, seen, g] @ q[b, t, h] / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        d_weights = v[b, seen, g] @ weight[b, t, h]
        d_scores = weights * (d_weights - weights @ d_weights) / np.sqrt(head_dim)
        dq[b, t, h] = d_scores @ k[b, seen, g]
        dk[b, seen, g] += d_scores[:, None] * q[b, t, h]
        dv[b, seen, g] += weights[:, None] * weight[b, t, h]
    return dq, dk, dv


def arrays(*, groups=2, scale=1.0):
    rng = np.random.default_rng(1)
    q = rng.normal(size=(2, 5, 4, 4)) * scale
    k, v = (rng.normal(size=(2, 5, groups, 4)) for _ in range(2))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


make_mask = jax.jit(attention_mask, static_argnames=("causal", "window"))


def mask_of(queries, keys, segments=None, *, causal=True):
    segments = None if segments is None else np.asarray(segments)
    found = make_mask(queries, keys, causal=causal, query_segments_BL=segments, key_segments_BS=segments)
    return np.broadcast_to(found, (2, *found.shape[1:]))


ORDER = np.arange(5)[None]
CAUSAL = mask_of(ORDER, ORDER)
BLIND = CAUSAL.copy()
BLIND[:, 2] = False
# groups (of 4 heads), scale of the scores, mask
CASES = {
    "causal": (4, 1.0, CAUSAL),
    "grouped": (2, 1.0, CAUSAL),
    "full, one key-value head": (1, 1.0, mask_of(ORDER, ORDER, causal=False)),
    "segments": (2, 1.0, mask_of(ORDER, ORDER, [[0, 0, 0, 1, 1], [0, 1, 1, 2, 2]])),
    "large scores": (2, 1e4, CAUSAL),
    "a query that sees nothing": (2, 1.0, BLIND),
}


@jax.jit
def outputs_and_gradients(q, k, v, mask, weight):
    def loss(q, k, v):
        out = attention(q, k, v, mask)
        return jnp.sum(out * weight), out

    gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return out, gradients


@pytest.mark.parametrize(("groups", "scale", "mask"), CASES.values(), ids=CASES)
def test_attention_and_its_gradients_are_the_naive_loops(groups, scale, mask):
    q, k, v = arrays(groups=groups, scale=scale)
    weight = np.random.default_rng(2).normal(size=q.shape).astype(np.float32)
    blind = ~mask.any(-1)
    weight[blind] = 0
    out, gradients = outputs_and_gradients(q, k, v, mask, weight)
    assert np.all(np.isfinite(out))
    # fp32 against float64; scores of 1e4 carry an absolute error of 1e-3, which moves weights that are not 0 or 1.
    expected = naive(q, k, v, mask)
    np.testing.assert_allclose(np.asarray(out)[~blind], expected[~blind], atol=2e-6 if scale == 1 else 2e-2)
    for found, wanted in zip(gradients, naive_gradients(q, k, v, mask, weight), strict=True):
        assert np.all(np.isfinite(found))
        if scale == 1:
            np.testing.assert_allclose(found, wanted, atol=5e-6)  # fp32 rounding of sums of 5


def test_softmax_is_float32_under_bf16():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in arrays())
    with jax.numpy_dtype_promotion("strict"):
        found = jax.jit(attention)(q, k, v, CAUSAL)
    assert found.dtype == jnp.bfloat16
    expected = naive(*(np.asarray(x, np.float64) for x in (q, k, v)), CAUSAL)
    # One rounding to 8 bits of the weights and one of the result, values up to 3.
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=2e-2)


# query positions, key positions, segments, causal, window, mask
MASKS = {
    "full": ([0, 1], [0, 1], None, False, None, ["11", "11"]),
    "cache": ([3, 4], [0, 1, 2, 3, 4, 5], None, True, None, ["111100", "111110"]),
    "segments": ([0, 1, 2], [0, 1, 2], [0, 0, 1], True, None, ["100", "110", "001"]),
    "segments without order": ([0, 1, 2], [0, 1, 2], [0, 0, 1], False, None, ["110", "110", "001"]),
    "window": ([0, 1, 2], [0, 1, 2], None, True, 2, ["100", "110", "011"]),
    "window on both sides": ([0, 1, 2], [0, 1, 2], None, False, 2, ["110", "111", "011"]),
}


def test_masks():
    for name, (queries, keys, segments, causal, window, mask) in MASKS.items():
        ids = None if segments is None else np.array([segments])
        positions = np.array([queries]), np.array([keys])
        found = make_mask(*positions, causal=causal, window=window, query_segments_BL=ids, key_segments_BS=ids)
        assert ["".join("01"[int(seen)] for seen in line) for line in np.asarray(found[0])] == mask, name
