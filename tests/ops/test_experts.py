"""Routing and the grouped experts against every expert on every token, forward and gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_experts import dense_experts

from jaxtrain.ops.experts import triton
from jaxtrain.ops.experts.compute import Kernels, count_tokens, grouped_experts, route, router_loss
from jaxtrain.ops.experts.grouped import BLOCKED, multiply_groups, tiled

BATCH, LENGTH, WIDTH, HIDDEN = 2, 12, 8, 16
# fp32 sums of up to 24 tokens x 16 products in another order: a few times 2^-24 = 6e-8, measured below 1e-6.
TOLERANCE = dict(rtol=1e-5, atol=1e-5)


def make_inputs(num_experts: int, gated: bool = True, dtype=jnp.float32):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    kernels = Kernels(
        normal(num_experts, WIDTH, HIDDEN) * 0.3,
        normal(num_experts, WIDTH, HIDDEN) * 0.3 if gated else None,
        normal(num_experts, HIDDEN, WIDTH) * 0.3,
    )
    logits = jnp.asarray(rng.normal(size=(BATCH, LENGTH, num_experts)), jnp.float32)
    return normal(BATCH, LENGTH, WIDTH), logits, kernels, normal(BATCH, LENGTH, WIDTH)


def flat(a):
    return a.reshape(-1, a.shape[-1])


def grouped(x, weights, ids, kernels):
    return grouped_experts(flat(x), flat(weights), flat(ids), kernels).reshape(x.shape).astype(x.dtype)


# experts, experts a token, gated
ROUTINGS = {
    "one expert": (1, 1, True),
    "top 1 of 4": (4, 1, True),
    "top 2 of 4": (4, 2, True),
    "top 2 of 8 without gate": (8, 2, False),
    "all of 3": (3, 3, True),
}


@pytest.mark.parametrize(("num_experts", "choices", "gated"), ROUTINGS.values(), ids=ROUTINGS)
def test_grouped_experts_are_the_dense_ones(num_experts, choices, gated):
    x, logits, kernels, target = make_inputs(num_experts, gated)

    def run(experts):
        def loss(x, logits, kernels):
            y = experts(x, *route(logits, choices), kernels)
            return jnp.sum(y * target), y

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(x, logits, kernels)

    (_, y), gradients = run(grouped)
    (_, expected), expected_gradients = run(dense_experts)
    np.testing.assert_allclose(y, expected, **TOLERANCE)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), gradients, expected_gradients)
    # One expert alone leaves its router nothing to choose.
    assert all(np.any(g) for g in jax.tree.leaves(expected_gradients)) or num_experts == 1


def test_one_choice_is_weighted_by_its_probability_among_all_experts():
    """Switch, equation 2, in plain NumPy, with the gradient that reaches the router."""
    _, logits, _, _ = make_inputs(4)
    plain = np.asarray(logits, np.float64)
    probabilities = np.exp(plain) / np.sum(np.exp(plain), axis=-1, keepdims=True)
    factors = np.random.default_rng(1).normal(size=plain.shape[:2])
    weights, ids = route(logits, 1)
    np.testing.assert_array_equal(ids[..., 0], np.argmax(plain, axis=-1))
    best = np.max(probabilities, axis=-1, keepdims=True)
    # A few roundings of float32, 6e-8 each.
    np.testing.assert_allclose(weights, best, rtol=1e-6)
    gradient = jax.grad(lambda logits: jnp.sum(route(logits, 1)[0][..., 0] * factors))(logits)
    one_hot = np.arange(4) == np.argmax(plain, axis=-1)[..., None]
    np.testing.assert_allclose(gradient, factors[..., None] * best * (one_hot - probabilities), atol=1e-6)


def test_all_tokens_to_one_expert_drops_none():
    x, logits, kernels, _ = make_inputs(4)
    logits = logits.at[..., 2].add(100.0)
    weights, ids = route(logits, 1)
    assert np.array_equal(count_tokens(ids, 4), [0, 0, BATCH * LENGTH, 0])
    alone = Kernels(*(kernel[2:3] for kernel in kernels))
    expected = grouped(x, weights, jnp.zeros_like(ids), alone)
    np.testing.assert_allclose(grouped(x, weights, ids, kernels), expected, **TOLERANCE)
    assert np.all(np.any(expected != 0, axis=-1))


def test_experts_elsewhere_give_nothing():
    """Ids of E are skipped: the two halves of the experts add up to all of them, and gradients stay finite."""
    x, logits, kernels, target = make_inputs(4)
    weights, ids = route(logits, 2)

    def halves(x, kernels):
        first, second = (Kernels(*(kernel[part] for kernel in kernels)) for part in (slice(0, 2), slice(2, 4)))
        below = jnp.where(ids < 2, ids, 2)
        above = jnp.where(ids < 2, 2, ids - 2)
        return jnp.sum((grouped(x, weights, below, first) + grouped(x, weights, above, second)) * target)

    def whole(x, kernels):
        return jnp.sum(dense_experts(x, weights, ids, kernels) * target)

    found, expected = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, kernels) for f in (halves, whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), found, expected)


def test_tokens_without_an_expert_give_exact_zeros():
    x, logits, kernels, _ = make_inputs(4)
    weights, ids = route(logits, 2)
    nowhere = jnp.full_like(ids, 4)
    y, pull = jax.vjp(lambda x, kernels: grouped(x, weights, nowhere, kernels), x, kernels)
    assert not np.any(y)
    assert not any(np.any(g) for g in jax.tree.leaves(pull(jnp.ones_like(y))))


def test_bfloat16_stays_close():
    x, logits, kernels, _ = make_inputs(4, dtype=jnp.bfloat16)
    weights, ids = route(logits, 2)
    y = grouped(x, weights, ids, kernels)
    assert y.dtype == jnp.bfloat16
    in_float32 = dense_experts(*jax.tree.map(lambda a: a.astype(jnp.float32), (x, weights)), ids, _float32(kernels))
    # bfloat16 holds 8 bits; the hidden layer and the outputs, of size up to 2, are rounded to it.
    np.testing.assert_allclose(y.astype(jnp.float32), in_float32, rtol=0.02, atol=0.05)


# Rows of each of three experts, of 256.
GROUPS = {
    "even, some unfilled": (70, 70, 70),
    "the middle one is empty": (129, 0, 127),
    "all to the last": (0, 0, 256),
    "nothing": (0, 0, 0),
}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    ("form", "width"),
    [(BLOCKED, 128), (BLOCKED, 64), pytest.param(tiled(interpret=True), 128, marks=pytest.mark.long)],
    ids=["parts of blocks", "blocks", "tiles"],
)
def test_forms_multiply_each_group_with_its_kernel(form, width, groups):
    """Products and both gradients of the filled rows, where the others hold NaN."""
    sizes = GROUPS[groups]
    filled, rng = sum(sizes), np.random.default_rng(0)
    rows, target = (rng.normal(size=(256, width)).astype(np.float32) for _ in range(2))
    kernels = rng.normal(size=(3, width, width)).astype(np.float32)
    rows[filled:] = target[filled:] = np.nan
    group_sizes = jnp.array(sizes, jnp.int32)
    y, pull = jax.vjp(lambda rows, kernels: multiply_groups(form, rows, kernels, group_sizes), rows, kernels)
    rows_gradient, kernels_gradient = pull(jnp.asarray(target))
    of_row = np.repeat(np.arange(3), sizes)
    # float32 sums of 128 to 256 products of size up to 10 in another order.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
    close(y[:filled], np.einsum("RI,RIO->RO", rows[:filled], kernels[of_row]))
    close(rows_gradient[:filled], np.einsum("RO,RIO->RI", target[:filled], kernels[of_row]))
    expected = [rows[:filled][of_row == e].T @ target[:filled][of_row == e] for e in range(3)]
    close(kernels_gradient, np.stack(expected))


@pytest.mark.parametrize(("num_rows", "num_experts"), [(8192, 8), (16384, 8), (65536, 64)])
def test_tiles_are_little_more_than_the_rows(num_rows, num_experts):
    """What the kernels for NVIDIA multiply at most, over what was routed."""
    assert triton.num_tiles(num_rows, num_experts) * triton.TILE <= 1.15 * num_rows


def _float32(kernels):
    return jax.tree.map(lambda a: a.astype(jnp.float32), kernels)


@pytest.mark.parametrize("choices", [1, 2, 5])
def test_route_is_top_k(choices):
    logits = make_inputs(5)[1].at[0, 0].set(0.0)  # a tie goes to the first
    weights, ids = route(logits, choices)
    chosen, expected = jax.lax.top_k(logits, choices)
    np.testing.assert_array_equal(ids, expected)
    # Of one choice the probability among all experts, of several the softmax over the chosen logits.
    single = jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1, keepdims=True)
    np.testing.assert_allclose(weights, single if choices == 1 else jax.nn.softmax(chosen, axis=-1), rtol=1e-6)
    assert weights.dtype == jnp.float32


def test_router_loss_is_the_published_formula():
    logits = make_inputs(4)[1]
    _, ids = route(logits, 2)
    load = count_tokens(ids, 4) / ids.size
    losses = router_loss(logits, load, load_balance_weight=0.3, router_z_weight=0.7)
    assert losses.shape == (BATCH, LENGTH)
    balance = 4 * jnp.sum(load * jnp.mean(jax.nn.softmax(logits), (0, 1)))
    z = jnp.mean(jnp.log(jnp.sum(jnp.exp(logits), -1)) ** 2)
    np.testing.assert_allclose(jnp.mean(losses), 0.3 * balance + 0.7 * z, rtol=1e-6)


@pytest.mark.parametrize(
    ("logits_E", "load_E", "expected"),
    [
        pytest.param([0.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], 1.0, id="even"),
        pytest.param([0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], 1.0, id="even probabilities"),
        pytest.param([99.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], 4.0, id="collapsed"),
    ],
)
def test_load_balance_loss(logits_E, load_E, expected):
    logits = jnp.broadcast_to(jnp.array(logits_E), (2, 3, 4))
    losses = router_loss(logits, jnp.array(load_E), load_balance_weight=0.01, router_z_weight=0.0)
    np.testing.assert_allclose(losses, 0.01 * expected, rtol=1e-6)
