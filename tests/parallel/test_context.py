"""Attention over a spread sequence against plain attention on one device, what it compiles to, and its errors."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.sharding import Layout
from jaxtrain.ops.attention.context import choose_context, context_attention
from jaxtrain.ops.attention.reference import attention, attention_mask, reference_attention
from jaxtrain.ops.attention.rules import AttentionForm, home, own_blocks, passing_blocks, score_elements

BATCH, LENGTH, HEADS, HEAD_DIM = 4, 32, 8, 4

# Documents that cross the borders of 2, 4 and 8 shards and of their halves, others that end on one; and a document
# a token, so that every block but the diagonal is masked as a whole.
PACKED = np.stack([np.repeat(np.arange(len(sizes)), sizes) for sizes in ((3, 14, 15), (16, 16), (1, 30, 1), (9, 23))])
ALONE = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))


def spread_attention(q, k, v, segments, form, layout):
    """`context_attention` with the plain formula for what a device has of it."""
    whole = functools.partial(reference_attention, form=form)
    return context_attention(q, k, v, segments, form=form, layout=layout, whole_attention=whole)


def layout(name, **degrees):
    return Layout(make_mesh(**{"data": 1, **degrees}), context_attention=name)


def arrays(groups, *, batch=BATCH, scale=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    shapes = [(batch, LENGTH, heads, HEAD_DIM) for heads in (HEADS, groups, groups)]
    q, k, v = (rng.normal(size=shape) for shape in shapes)
    return tuple(jnp.asarray(x, dtype) for x in (q * scale, k, v))


def output_and_gradients(attend):
    """(q, k, v, segments) -> output and the gradients of q, k and v, for a loss that weighs each element otherwise."""

    def loss(q, k, v, segments):
        out = attend(q, k, v, segments)
        weights = jnp.cos(jnp.arange(math.prod(out.shape[1:]), dtype=jnp.float32)).reshape(out.shape[1:])
        return jnp.sum(out.astype(jnp.float32) * weights), out

    def run(q, k, v, segments):
        gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v, segments)
        return (out, *gradients)

    return run


@functools.cache
def plain(causal):
    def attend(q, k, v, segments):
        order = jnp.arange(LENGTH)[None]
        return attention(
            q, k, v, attention_mask(order, order, causal=causal, query_segments_BL=segments, key_segments_BS=segments)
        )

    return jax.jit(output_and_gradients(attend))


def spread(layout, causal):
    def attend(q, k, v, segments):
        return spread_attention(q, k, v, segments, AttentionForm(causal=causal), layout)

    return output_and_gradients(attend)


@functools.cache
def compiled(name, degrees, causal):
    return jax.jit(spread(layout(name, **dict(degrees)), causal))


def assert_same(found, expected, tolerance):
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(np.abs(other).max(), 1), err_msg=name)


# Sums of 32 weights and of up to 32 x 8 gradients in another order: a few roundings of 6e-8 of the largest value.
FP32 = 2e-6

C4 = (("context", 4), ("data", 2))
C2TD = (("context", 2), ("tensor", 2), ("data", 2))
C2TF = (("context", 2), ("tensor", 2), ("fsdp", 2))

# implementation, mesh, key-value heads (of 8 heads), segments, causal
CASES = {
    "ring, 4, packed, grouped": ("ring", C4, 2, PACKED, True),
    "ring, 4, a document a token": ("ring", C4, 2, ALONE, True),
    "ring, 2 with tensor and data, packed, one kv head": ("ring", C2TD, 1, PACKED, True),
    "ring, 2 with tensor and fsdp, full, grouped": ("ring", C2TF, 2, None, False),
    "all-to-all, 4, packed, grouped": ("all_to_all", C4, 2, PACKED, True),
    "all-to-all, 2 with tensor and fsdp, full, one kv head": ("all_to_all", C2TF, 1, None, False),
    "gather, 4, packed, grouped": ("gather", C4, 2, PACKED, True),
    "gather, 2 with tensor and fsdp, packed, one kv head": ("gather", C2TF, 1, PACKED, True),
}


# Packed and grouped, by each way: what plain pytest runs.
PLAIN = (
    "ring, 4, packed, grouped",
    "ring, 4, a document a token",
    "all-to-all, 4, packed, grouped",
    "gather, 4, packed, grouped",
)
ROWS = [pytest.param(*values, id=row, marks=() if row in PLAIN else pytest.mark.long) for row, values in CASES.items()]


@pytest.mark.parametrize(("name", "degrees", "groups", "segments", "causal"), ROWS)
def test_output_and_gradients_are_those_of_one_device(name, degrees, groups, segments, causal):
    inputs = (*arrays(groups), segments)
    with jax.numpy_dtype_promotion("strict"):
        found = jax.block_until_ready(compiled(name, degrees, causal)(*inputs))
    assert_same(found, plain(causal)(*inputs), FP32)


def test_ring_survives_large_scores():
    inputs = (*arrays(2, scale=1e4), PACKED)
    found = jax.block_until_ready(compiled("ring", C4, True)(*inputs))
    expected = plain(True)(*inputs)
    assert all(np.all(np.isfinite(x)) for x in found)
    # fp32 scores of 1e4 carry an absolute error of 1e-3, which moves weights that are not 0 or 1; gradients of k too,
    # by 1e-3 of their size.
    assert_same(found, expected, 5e-3)


@pytest.mark.long
def test_a_batch_that_does_not_divide_is_worked_on_whole():
    inputs = (*arrays(2, batch=1), PACKED[:1])
    found = jax.block_until_ready(jax.jit(spread(layout("gather", context=4, data=2), True))(*inputs))
    assert_same(found, plain(True)(*inputs), FP32)


def hlo(name, length):
    """The compiled forward and backward pass on context=4, data=2, with everything laid out as in a step."""
    there = layout(name, context=4, data=2)
    rows = NamedSharding(there.mesh, PartitionSpec("data", "context"))
    q, k, segments = (
        jax.ShapeDtypeStruct((BATCH, length, *more), dtype, sharding=rows)
        for more, dtype in (((HEADS, HEAD_DIM), jnp.float32), ((2, HEAD_DIM), jnp.float32), ((), jnp.int32))
    )
    return jax.jit(spread(there, True), out_shardings=rows).lower(q, k, k, segments).compile().as_text()


def largest_buffer(text):
    return max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"(?:f32|pred)\[([\d,]+)\]", text))


@pytest.mark.long
def test_the_ring_only_passes_on_and_keeps_no_scores():
    length = 16 * LENGTH
    text = hlo("ring", length)
    assert "collective-permute" in text
    for other in ("all-gather", "all-to-all", "all-reduce", "conditional"):
        assert f" {other}" not in text
    # No float or mask outgrows one block of scores: two chunks of 8 against each other.
    assert largest_buffer(text) == BATCH // 2 * HEADS * (length // 8) ** 2


def test_a_scan_over_layers_keeps_no_masks_of_the_ring():
    there = layout("ring", context=4, data=2)

    def loss(x, segments):
        def layer(x, _):
            return spread_attention(x, x, x, segments, AttentionForm(), there), None

        return jnp.sum(jax.lax.scan(layer, x, None, length=3)[0])

    program = jax.make_jaxpr(jax.grad(loss))(arrays(HEADS)[0], jnp.asarray(PACKED))
    # What is the same for every layer is computed in front of the scan.
    hoisted = [equation for equation in program.eqns if equation.primitive.name == "shard_map"]
    kept = [value.aval.size for equation in hoisted for value in equation.outvars]
    assert max(kept) <= BATCH * LENGTH  # the segments, and nothing the size of a block


def test_all_to_all_and_gather_hold_no_collective_permute():
    for name, collective in {"all_to_all": "all-to-all", "gather": "all-gather"}.items():
        text = hlo(name, LENGTH)
        assert f" {collective}" in text
        assert "collective-permute" not in text


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_device_computes_the_same_and_nothing_in_vain(size):
    counts = {score_elements(own, size=size, length=4 * size, causal=True) for own in range(size)}
    chunk = 2  # positions, of the 4 a device
    assert counts == {(2 * size + 1) * chunk**2}
    visited = []
    for own in range(size):
        for source in range(size):
            blocks = own_blocks(causal=True) if source == own else passing_blocks(own, source, causal=True)
            visited += [((own, 2 * size - 1 - own)[q], (source, 2 * size - 1 - source)[k]) for q, k in blocks]
    # Chunks in true order: a query chunk meets its own and all earlier ones, each once, and no later one.
    assert sorted(visited) == [(query, key) for query in range(2 * size) for key in range(query + 1)]
    assert [home(chunk, size) for chunk in range(2 * size)] == [*range(size), *reversed(range(size))]


# wanted, mesh, heads, key-value heads, chosen
CHOICES = [
    ("auto", dict(context=8), 6, 6, "ring"),
    ("auto", dict(context=4, pipe=2), 8, 2, "all_to_all"),
    ("auto", dict(context=2, pipe=2, tensor=2), 6, 6, "gather"),
    ("gather", dict(context=8), 8, 8, "gather"),
]


def test_choice():
    for wanted, degrees, heads, groups, chosen in CHOICES:
        assert choose_context(layout(wanted, **degrees), heads, groups) == chosen


# implementation, mesh, heads, key-value heads, sequence length, message
WRONG = {
    "ring in a pipeline": ("ring", dict(context=4, pipe=2), 8, 8, 32, "use all_to_all, gather or auto"),
    "heads for all-to-all": (
        "all_to_all", dict(context=4, tensor=2), 12, 4, 32,
        "model.num_heads=12 does not divide by parallel.context=4 x parallel.tensor=2; make it 8 or 16, or use "
        "parallel.context=2 or parallel.context_attention=ring",
    ),
    "length of a causal ring": (
        "auto", dict(context=8), 8, 8, 40, "make it 32 or 48, or use parallel.context_attention=gather",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "degrees", "heads", "groups", "length", "message"), WRONG.values(), ids=WRONG)
def test_errors(name, degrees, heads, groups, length, message):
    there = layout(name, **degrees)
    q, k = (jax.ShapeDtypeStruct((8, length, h, HEAD_DIM), jnp.float32) for h in (heads, groups))
    with pytest.raises(ConfigError, match=re.escape(message)):
        jax.eval_shape(lambda q, k: spread_attention(q, k, k, None, AttentionForm(), there), q, k)
