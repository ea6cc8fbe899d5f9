"""Routing and the grouped experts against every expert on every token, forward and gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_experts import dense_experts

from jaxtrain.ops.experts.compute import Kernels, RouteRule, count_tokens, grouped_experts, route, router_loss
from jaxtrain.ops.experts.grouped import BLOCKED, multiply_groups, tiled

BATCH, LENGTH, WIDTH, HIDDEN, EXPERTS = 2, 12, 8, 16, 4
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(BATCH, LENGTH, EXPERTS)).astype(np.float32)
X, TARGET = (RNG.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32) for _ in range(2))
SHAPES = {"up": (EXPERTS, WIDTH, HIDDEN), "gate": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
BIASES = {"up_bias": (EXPERTS, HIDDEN), "gate_bias": (EXPERTS, HIDDEN), "down_bias": (EXPERTS, WIDTH)}


def drawn(shapes, scale):
    return {name: (scale * RNG.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}


KERNELS = Kernels(**drawn(SHAPES, 0.3))
# Large enough that both bounds of the gate count.
BIASED = Kernels(**drawn(SHAPES, 3.0), **drawn(BIASES, 3.0), activation="clamped_swiglu")
# fp32 sums of up to 24 tokens x 16 products in another order: a few times 2^-24 = 6e-8, measured below 1e-6.
TOLERANCE = dict(rtol=1e-5, atol=1e-5)


def grouped(x, weights, ids, kernels):
    flat = (a.reshape(-1, a.shape[-1]) for a in (x, weights, ids))
    return grouped_experts(*flat, kernels).reshape(x.shape).astype(x.dtype)


@functools.partial(jax.jit, static_argnums=0)
def outputs_and_gradients(experts, x, weights, ids, kernels):
    """Gradients in x, the weights of the router and the kernels."""

    def loss(x, weights, kernels):
        y = experts(x, weights, ids, kernels)
        return jnp.sum(y * TARGET), y

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weights, kernels)


def best(choices):
    return np.argsort(-LOGITS, axis=-1, kind="stable")[..., :choices].astype(np.int32)


# Ids of 4 are of no expert, as those of other devices are: their pairs give exact zeros.
ROUTINGS = {
    "two choices": best(2),
    "all to one": np.broadcast_to(np.int32([2, 4]), (BATCH, LENGTH, 2)),
    "some elsewhere": np.where(best(2) < 2, best(2), 4),
    "all elsewhere": np.full((BATCH, LENGTH, 2), 4, np.int32),
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_grouped_experts_are_the_dense_ones(routing):
    ids = ROUTINGS[routing]
    weights = np.random.default_rng(1).uniform(0.1, 1, ids.shape).astype(np.float32)
    kernels, scale = (BIASED, 1e3) if routing == "some elsewhere" else (KERNELS, 1.0)
    found, expected = (outputs_and_gradients(f, X, weights, ids, kernels) for f in (grouped, dense_experts))
    close = dict(TOLERANCE, atol=TOLERANCE["atol"] * scale)  # of numbers that are larger
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), found, expected)
    (_, y), gradients = found
    assert np.all(np.any(y != 0, axis=-1)) == (routing in ("two choices", "all to one"))
    if routing == "all elsewhere":
        assert not any(np.any(leaf) for leaf in jax.tree.leaves((y, gradients)))


def test_one_choice_without_a_gate():
    kernels = dataclasses.replace(KERNELS, gate=None)
    weights = np.ones((BATCH, LENGTH, 1), np.float32)
    found, expected = (outputs_and_gradients(f, X, weights, best(1), kernels) for f in (grouped, dense_experts))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), found, expected)


# Rows of each of three experts, of 256.
GROUPS = {
    "even, some unfilled": (70, 70, 70),
    "the middle one is empty": (129, 0, 127),
    "all to the last": (0, 0, 256),
    "nothing": (0, 0, 0),
}


@functools.partial(jax.jit, static_argnums=0)
def products_and_gradients(form, rows, kernels, sizes, target):
    y, pull = jax.vjp(lambda rows, kernels: multiply_groups(form, rows, kernels, sizes), rows, kernels)
    return y, *pull(target)


TILES = tiled(interpret=True)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    ("form", "width"),
    [(BLOCKED, 128), (BLOCKED, 64), pytest.param(TILES, 128, marks=pytest.mark.long)],
    ids=["parts of blocks", "blocks", "tiles"],
)
def test_forms_multiply_each_group_with_its_kernel(form, width, groups):
    """Products and both gradients of the filled rows, where the others hold NaN."""
    sizes = GROUPS[groups]
    filled, rng = sum(sizes), np.random.default_rng(0)
    rows, target = (rng.normal(size=(256, width)).astype(np.float32) for _ in range(2))
    kernels = rng.normal(size=(3, width, width)).astype(np.float32)
    rows[filled:] = target[filled:] = np.nan
    y, rows_gradient, kernels_gradient = products_and_gradients(form, rows, kernels, np.int32(sizes), target)
    of_row = np.repeat(np.arange(3), sizes)
    # float32 sums of 128 to 256 products of size up to 10 in another order.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
    close(y[:filled], np.einsum("RI,RIO->RO", rows[:filled], kernels[of_row]))
    close(rows_gradient[:filled], np.einsum("RO,RIO->RI", target[:filled], kernels[of_row]))
    expected = [rows[:filled][of_row == e].T @ target[:filled][of_row == e] for e in range(3)]
    close(kernels_gradient, np.stack(expected))


RULES = {
    "sigmoid, scaled": RouteRule(sigmoid=True, scale=2.5),
    "sigmoid, as they are": RouteRule(sigmoid=True, normalized=False),
    "probabilities of several": RouteRule(normalized=False),
    "groups": RouteRule(sigmoid=True, groups=3, groups_per_token=2),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_routing_in_numpy(rule):
    """DeepSeek V3, section 2.1.2: a bias and groups decide which experts, the scores alone their weights."""
    draws, rule = np.random.default_rng(2), RULES[rule]
    logits, bias = draws.normal(size=(2, 5, 9)).astype(np.float32), draws.normal(size=9).astype(np.float32)

    def weights_of(logits, bias):
        weights, ids = route(logits, 3, rule, bias)
        return jnp.sum(weights * jnp.arange(3)), (weights, ids)

    (of_logits, of_bias), (weights, ids) = jax.jit(jax.grad(weights_of, (0, 1), has_aux=True))(logits, bias)
    exact = logits.astype(np.float64)
    scores = 1 / (1 + np.exp(-exact)) if rule.sigmoid else np.exp(exact) / np.exp(exact).sum(-1, keepdims=True)
    for row in np.ndindex(2, 5):
        order = scores[row] + bias
        if rule.groups > 1:
            groups = order.reshape(rule.groups, -1)
            taken = np.argsort(-np.sort(groups, -1)[:, -2:].sum(-1))[: rule.groups_per_token]
            order = np.where(np.isin(np.arange(9) // groups.shape[1], taken), order, -np.inf)
        wanted = np.argsort(-order)[:3]
        np.testing.assert_array_equal(ids[row], wanted)
        chosen = scores[row][wanted]
        chosen = chosen if rule.normalized is False else chosen / chosen.sum()
        np.testing.assert_allclose(weights[row], rule.scale * chosen, rtol=1e-5)
    assert np.any(of_logits != 0)
    assert not np.any(of_bias)


@pytest.mark.parametrize("choices", [1, 3])
def test_route_is_top_k_in_numpy(choices):
    """With the gradient that reaches the router: Switch, equation 2, of one choice, Mixtral, section 2.1, of more."""
    logits = LOGITS.copy()
    logits[0, 0] = 0  # a tie goes to the first
    factors = np.random.default_rng(1).normal(size=(BATCH, LENGTH, choices)).astype(np.float32)

    def loss(logits):
        weights, ids = route(logits, choices)
        return jnp.sum(weights * factors), (weights, ids)

    gradient, (weights, ids) = jax.jit(jax.grad(loss, has_aux=True))(logits)
    expected_ids = np.argsort(-logits, axis=-1, kind="stable")[..., :choices]
    np.testing.assert_array_equal(ids, expected_ids)
    exact = np.exp(logits.astype(np.float64))
    chosen = np.take_along_axis(exact, expected_ids, -1)
    # Of one choice the probability among all experts, of several the softmax over the chosen logits.
    among = exact if choices == 1 else chosen
    expected = chosen / among.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)  # a few roundings of float32
    assert weights.dtype == jnp.float32
    slopes = np.zeros_like(exact)
    np.put_along_axis(slopes, expected_ids, factors * expected, -1)
    all_weights = exact / exact.sum(-1, keepdims=True) if choices == 1 else np.zeros_like(exact)
    if choices > 1:
        np.put_along_axis(all_weights, expected_ids, expected, -1)
    slopes -= all_weights * np.sum(factors * expected, -1, keepdims=True)
    np.testing.assert_allclose(gradient, slopes, atol=1e-6)


def test_router_loss_is_the_published_formula():
    ids = best(2)
    load = count_tokens(jnp.asarray(ids), EXPERTS) / ids.size
    np.testing.assert_allclose(load, np.bincount(ids.ravel(), minlength=EXPERTS) / ids.size, rtol=1e-6)

    def mean(logits, load):
        losses = router_loss(logits, load, load_balance_weight=0.3, router_z_weight=0.7)
        assert losses.shape == (BATCH, LENGTH)
        return jnp.mean(losses)

    found, (_, of_load) = jax.jit(jax.value_and_grad(mean, (0, 1)))(LOGITS, load)
    exact = np.exp(LOGITS.astype(np.float64))
    balance = EXPERTS * np.sum(np.asarray(load) * np.mean(exact / exact.sum(-1, keepdims=True), (0, 1)))
    z = np.mean(np.log(exact.sum(-1)) ** 2)
    np.testing.assert_allclose(found, 0.3 * balance + 0.7 * z, rtol=1e-6)
    assert not np.any(of_load), "no gradient flows through the load"
