"""The state space of Mamba 2 by chunks of tokens, and the causal convolution before it.

    state_t = exp(decay step_t) state_{t-1} + step_t value_t key_t^T        y_t = state_t query_t

The state [K, N] of a head begins with zeros at the first token of a document, which padding is too. Source: Dao and Gu
2024, "Transformers are SSMs" (arXiv 2405.21060), with their x, B, C as value, key, query: equation 1 is the recurrence
and section 6 the form by chunks. Inside a chunk tokens see each other as in attention with scores that decay (equation
6); a state passes from chunk to chunk. Steps, decays and states are float32, as are the sums of the products.

Shapes: B batch, L length, Q tokens of a chunk, G groups, R heads of a group, H = G x R heads, K head_dim, N state_dim.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class StateInputs(NamedTuple):
    """What a state space reads; the paper calls them C, B, x, delta and A, which is negative."""

    query: Array  # [B, L, G, N], any float dtype
    key: Array  # [B, L, G, N]
    value: Array  # [B, L, H, K]
    step: Array  # float32 [B, L, H]
    decay: Array  # float32 [H]


def document_numbers(segments_BL: Array | None, batch: int, length: int) -> Array:
    """How many borders of documents stand up to each token, int32 [B, L]; each change of `segments` is one."""
    if segments_BL is None:
        return jnp.zeros((batch, length), jnp.int32)
    changes = segments_BL[:, 1:] != segments_BL[:, :-1]
    return jnp.cumsum(jnp.pad(changes, ((0, 0), (1, 0))).astype(jnp.int32), axis=1)


@functools.partial(jax.checkpoint, prevent_cse=False)
def causal_convolution(x: Array, kernel: Array, bias: Array, documents_BL: Array) -> Array:
    """SiLU of a sum over the last W tokens of the document, each channel by itself; the backward pass keeps x alone.

    x is [B, L, *C] and gives shape and dtype of the result, `kernel` [W, *C] with the entry of the token itself last.
    """
    width, length = kernel.shape[0], x.shape[1]
    total = jnp.broadcast_to(bias.astype(jnp.float32), x.shape)
    for back in range(width):
        earlier = [(0, 0), (back, 0), *[(0, 0)] * (x.ndim - 2)]
        same = documents_BL == jnp.pad(documents_BL, earlier[:2], constant_values=-1)[:, :length]
        shifted = jnp.where(same.reshape(*same.shape, *[1] * (x.ndim - 2)), jnp.pad(x, earlier)[:, :length], 0)
        weights = jnp.broadcast_to(kernel[width - 1 - back].astype(jnp.float32), x.shape)
        total = total + shifted.astype(jnp.float32) * weights
    return jax.nn.silu(total).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4))
def gated_norm(y_BLHK: Array, gate_BLHK: Array, scale_HK: Array, groups: int, epsilon: float) -> Array:
    """The RMSNorm of each group of heads, in float32, of what SiLU of the gate lets through; it keeps its inputs."""
    y = y_BLHK.astype(jnp.float32) * jax.nn.silu(gate_BLHK.astype(jnp.float32))
    grouped = y.reshape(*y.shape[:2], groups, -1)
    grouped = grouped * jax.lax.rsqrt(jnp.mean(grouped * grouped, axis=-1, keepdims=True) + epsilon)
    return (grouped.reshape(y.shape) * scale_HK.astype(jnp.float32)[None, None]).astype(y_BLHK.dtype)


def after_tail(x: Array, tail: Array, documents_BL: Array, real_BL: Array) -> tuple[Array, Array, Array]:
    """Put the tail [B, W, *C], tokens before x, in front of x: [B, W + L, *C], its documents, and the tail after it.

    Document 0 continues that of the tail. `real_BL`, bool, are the tokens that count, which come first.
    """
    width = tail.shape[1]
    x = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    documents = jnp.pad(documents_BL, ((0, 0), (width, 0)))
    at_BW = jnp.sum(real_BL, axis=1, keepdims=True) + jnp.arange(width)[None]
    found = jnp.take_along_axis(documents, at_BW, axis=1)
    at, same = (y.reshape(*y.shape, *[1] * (x.ndim - 2)) for y in (at_BW, found == found[:, -1:]))
    return x, documents, jnp.where(same, jnp.take_along_axis(x, at, axis=1), 0).astype(tail.dtype)


def _no_state(given: StateInputs) -> Array:
    """Zeros float32 [B, G, R, K, N], derived from the inputs, so that in `jax.shard_map` they vary over its axes."""
    value_BGRK = given.value[:, 0].reshape(given.key.shape[0], given.key.shape[2], -1, given.value.shape[-1])
    like = jnp.einsum("bgn,bgrk->bgrkn", given.key[:, 0], value_BGRK)
    return jnp.where(like == like, jnp.float32(0), jnp.float32(0))


def state_space(
    given: StateInputs, documents_BL: Array, *, chunk: int, state: Array | None = None
) -> tuple[Array, Array]:
    """Run the recurrence by chunks of tokens, as products of matrices; backward keeps the states between chunks alone.

    Args:
        given: what it reads; a step of 0 leaves the state as it is.
        documents_BL: of `document_numbers`.
        chunk: tokens that are in memory at a time.
        state: float32 [B, H, K, N] before the first token, of document 0; None: zeros.

    Returns:
        [B, L, H, K] in the dtype of `value`, and the state after the last token.
    """
    batch, length = documents_BL.shape
    chunk = min(chunk, length)
    padding = -length % chunk

    def chunks(x: Array) -> Array:
        # The document of the last token, so that the state after it stays.
        x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)], mode="edge" if x.ndim == 2 else "constant")
        return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

    before = _no_state(given)
    before = before if state is None else before + state.reshape(before.shape)
    body = jax.checkpoint(functools.partial(_chunk, decay_H=given.decay), prevent_cse=False)
    arrays = tuple(chunks(x) for x in (given.query, given.key, given.value, given.step, documents_BL))
    (after, _), y = jax.lax.scan(body, (before, documents_BL[:, 0] * 0), arrays)
    y = jnp.moveaxis(y, 0, 1).reshape(batch, length + padding, *given.value.shape[2:])[:, :length]
    return y, after.reshape(batch, *given.value.shape[2:], -1)


def _chunk(
    carry: tuple[Array, Array], tokens: tuple[Array, ...], *, decay_H: Array
) -> tuple[tuple[Array, Array], Array]:
    """The outputs of a chunk [B, Q, H, K], and the state and the document after it."""
    (state_BGRKN, before_B), (query, key, value, step, documents_BQ) = carry, tokens
    (batch, chunk, groups, _), dtype = key.shape, value.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def grouped(x: Array) -> Array:
        return jnp.moveaxis(x, 1, -1).reshape(batch, groups, -1, chunk)

    # Differences of sums of float32 lose what is far below the sums: whole numbers, which lose nothing, are apart.
    decay, step_BGRQ = step * decay_H[None, None], grouped(step)
    whole = jnp.round(decay)
    sums_BGRQ = [grouped(jnp.cumsum(x, axis=1)) for x in (whole, decay - whole)]
    value_BQGRK = value.reshape(batch, chunk, groups, -1, value.shape[-1])
    # What a token reads of each earlier one in the chunk.
    sees_BQS = (documents_BQ[:, :, None] == documents_BQ[:, None]) & jnp.tril(jnp.ones((chunk, chunk), bool))[None]
    decays = functools.reduce(jnp.add, (x[..., None] - x[..., None, :] for x in sums_BGRQ))
    decays = jnp.exp(jnp.where(sees_BQS[:, None, None], decays, -jnp.inf))
    scores = product("bqgn,bsgn->bgqs", query, key)[:, :, None] * decays * step_BGRQ[..., None, :]
    y_BQGRK = product("bgrqs,bsgrk->bqgrk", scores.astype(dtype), value_BQGRK)
    # What it reads of the state before the chunk.
    kept = jnp.exp(sums_BGRQ[0] + sums_BGRQ[1]) * (documents_BQ == before_B[:, None])[:, None, None]
    read = product("bqgn,bgrkn->bqgrk", query, state_BGRKN.astype(dtype))
    y_BQGRK = y_BQGRK + read * jnp.moveaxis(kept, 3, 1)[..., None]
    # What the chunk leaves of that state, and adds to it.
    last_B = documents_BQ[:, -1]
    added = jnp.exp(functools.reduce(jnp.add, (x[..., -1:] - x for x in sums_BGRQ))) * step_BGRQ
    added = added * (documents_BQ == last_B[:, None])[:, None, None]
    written = (value_BQGRK * jnp.moveaxis(added, 3, 1)[..., None]).astype(dtype)
    state_BGRKN = state_BGRKN * kept[..., -1, None, None] + product("bsgn,bsgrk->bgrkn", key, written)
    return (state_BGRKN, last_B), y_BQGRK.reshape(value.shape).astype(dtype)
