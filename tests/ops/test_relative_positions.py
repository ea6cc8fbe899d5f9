"""Relative positions: the buckets of T5, the unfolded bias, and its gradient through every kernel that takes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.ops.attention.blockwise import blockwise_attention
from jaxtrain.ops.attention.reference import (
    Learned,
    bias_at,
    distance_bias,
    fold,
    reference_attention,
    unfold,
    whole_bias,
)
from jaxtrain.ops.attention.rules import AttentionCase, AttentionForm, ContextCase, choose_context_way, refusal

# The bucket of each distance (key - query), counted by hand from the paper's rule: 8 buckets up to distance 16.
_CAUSAL = {5: 0, 0: 0, -1: 1, -3: 3, -4: 4, -5: 4, -6: 5, -8: 6, -11: 6, -12: 7, -16: 7, -100: 7}
_BOTH = {0: 0, -1: 1, -2: 2, -5: 2, -6: 3, -100: 3, 1: 5, 2: 6, 5: 6, 6: 7, 100: 7}


@pytest.mark.parametrize(("causal", "buckets"), [(True, _CAUSAL), (False, _BOTH)], ids=["causal", "both-sides"])
def test_each_distance_has_the_bucket_of_the_paper(causal, buckets):
    table_NH = jnp.arange(8.0)[:, None]
    bias_HW = distance_bias(table_NH, 100, max_distance=16, causal=causal)
    assert {distance: int(bias_HW[0, distance + 100]) for distance in buckets} == buckets


@pytest.mark.parametrize("num_queries", [1, 7], ids="{} queries".format)
def test_unfold_lays_distances_out_and_fold_sums_them(num_queries):
    bias_HW = jnp.arange(22.0).reshape(2, 11)
    num_keys = 12 - num_queries
    index_TS = np.arange(num_keys)[None] - np.arange(num_queries)[:, None] + num_queries - 1
    unfolded = jax.jit(unfold, static_argnums=1)(bias_HW, num_queries)
    np.testing.assert_array_equal(unfolded, np.asarray(bias_HW)[:, index_TS])
    ones_HW = np.bincount(index_TS.ravel(), minlength=11)
    folded = jax.jit(fold)(jnp.ones((2, num_queries, num_keys)))
    np.testing.assert_array_equal(folded, np.stack([ones_HW, ones_HW]))


def test_generation_looks_up_what_training_unfolds():
    table_NH = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)

    @jax.jit
    def run(table_NH):
        trained = whole_bias(distance_bias(table_NH, 39, max_distance=16, causal=True))
        near = distance_bias(table_NH, 16, max_distance=16, causal=True)  # from 16 on, all distances share a bucket
        return trained, bias_at(near, jnp.arange(40)[None], jnp.arange(40))

    trained, found = run(table_NH)
    np.testing.assert_array_equal(np.tril(found[0]), np.tril(trained))


@pytest.mark.parametrize(
    ("form", "packed"),
    [
        (AttentionForm(causal=False, relative=True), True),
        (AttentionForm(window=9, softcap=2.0, relative=True), False),
    ],
    ids=["both-sides-packed", "window-and-softcap"],
)
def test_blocks_agree_with_the_reference_and_so_do_the_gradients_of_table_and_sinks(form, packed, monkeypatch):
    """Tolerances: float32 sums of 40 products in another order."""
    monkeypatch.setattr("jaxtrain.ops.attention.blockwise.parts_of_batch", lambda *_: 2)
    shapes = (*((2, 40, heads, 8) for heads in (4, 2, 2)), (8, 4), (2, 40, 4, 8))
    rng = np.random.default_rng(1)
    q, k, v, table_NH, weight = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    segments = np.repeat([[1, 2], [1, 0]], 20, axis=1) if packed else None

    def loss(q, k, v, table_NH, sink_H, attend):
        learned = Learned(distance_bias(table_NH, 39, max_distance=16, causal=form.causal), sink_H)
        return jnp.sum(attend(q, k, v, segments, form, learned) * weight)

    def blocks(*arguments):
        return blockwise_attention(*arguments, block=16)

    values = {}
    for name, attend in (("reference", reference_attention), ("blocks", blocks)):
        run = jax.jit(jax.value_and_grad(lambda *args, attend=attend: loss(*args, attend), argnums=(0, 1, 2, 3, 4)))
        values[name] = run(q, k, v, table_NH, np.array([0.5, -1.0, 2.0, 0.0], np.float32))
    np.testing.assert_allclose(values["blocks"][0], values["reference"][0], rtol=1e-4)
    for found, wanted in zip(values["blocks"][1], values["reference"][1], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("kernel", "platform"), [("cudnn", "gpu"), ("splash", "tpu")], ids=["cudnn", "splash"])
def test_fused_kernels_refuse_relative_positions_with_the_reason(kernel, platform):
    case = AttentionCase(platform, "bfloat16", length=512, head_dim=64, form=AttentionForm())
    relative = AttentionCase(platform, "bfloat16", length=512, head_dim=64, form=AttentionForm(relative=True))
    assert refusal(kernel, case) is None
    assert refusal(kernel, relative) == "positions are relative"


def test_a_sharded_sequence_with_relative_positions_is_refused():
    case = ContextCase(2, 1, 1, num_heads=4, num_kv_heads=4, form=AttentionForm(relative=True))
    for way in ("auto", "ring", "all_to_all", "gather"):
        with pytest.raises(ConfigError, match=r"parallel.context=2 .* model.position=relative"):
            choose_context_way(way, case)
