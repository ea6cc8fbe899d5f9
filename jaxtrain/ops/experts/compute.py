"""Mixture of experts on one device: routing, its losses, and the experts as grouped matmuls.

Shapes: B batch, L sequence, N tokens, D embed, F hidden width, E experts, K experts per token, R rows of the grouped
matmul (one per pair of a token and an expert of this device).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.layout.manual import vary_alike
from jaxtrain.ops.elementwise import GATED, aligned, gelu
from jaxtrain.ops.experts.grouped import grouped_matmul
from jaxtrain.remat.policy import EXPERT_PRODUCTS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kernels:
    """Weights of the experts.

    Attributes:
        up, gate: [E, D, F]; no gate: GELU between `up` and `down`.
        down: [E, F, D].
        up_bias, gate_bias, down_bias: [E, F], [E, F] and [E, D]; None: there are none.
        activation: of the gate, a key of `GATED`.
    """

    up: Any
    gate: Any
    down: Any
    up_bias: Any = None
    gate_bias: Any = None
    down_bias: Any = None
    activation: str = field(default="swiglu", metadata=dict(static=True))


class Places(NamedTuple):
    """Which pair of a token and an expert is in which row.

    Attributes:
        pair_R: int32, number of the pair (token * K + choice) in each row; N * K where there is none.
        row_NK: int32, row of each pair; R where the pair has none. The inverse of `pair_R`.
    """

    pair_R: Array
    row_NK: Array


@dataclass(frozen=True)
class RouteRule:
    """How a router chooses experts, and what weighs them.

    Attributes:
        sigmoid: the score of an expert is the sigmoid of its logit; else its probability among all experts.
        normalized: the weights of a token sum to 1, times the scale; None: where it has several experts.
        scale: factor of the weights.
        groups: equal groups of experts; a token takes experts of `groups_per_token` of them alone, those whose two best
            experts have the largest sum (DeepSeek-AI 2024, DeepSeek V3, section 2.1.2).
        groups_per_token: groups that a token takes experts of.
    """

    sigmoid: bool = False
    normalized: bool | None = None
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1


def route(
    logits_BLE: Array, experts_per_token: int, rule: RouteRule | None = None, bias_E: Array | None = None
) -> tuple[Array, Array]:
    """Choose the experts of each token, and the weight of each.

    With two choices or more the weights are the softmax over the chosen logits (Jiang et al. 2024, Mixtral, section
    2.1), or their scores over the sum of these. Over one logit that softmax is 1 and would teach the router nothing, so
    a single choice has its score as weight (Fedus et al. 2021, Switch, equation 2).

    Args:
        logits_BLE: float32, E replicated.
        experts_per_token: K.
        rule: how scores and weights are made; None: `RouteRule()`.
        bias_E: float32, added to the scores where experts are chosen, not in the weights; without a gradient here.

    Returns:
        Weights float32 [B, L, K], differentiable in the logits, and expert ids int32 [B, L, K], distinct for each token
        and best first.
    """
    rule = rule or RouteRule()
    by_score = rule.sigmoid or bias_E is not None or rule.groups > 1
    scores_BLE = jax.nn.sigmoid(logits_BLE) if rule.sigmoid else jax.nn.softmax(logits_BLE, axis=-1)
    left_BLE = jax.lax.stop_gradient(scores_BLE if by_score else logits_BLE)
    if bias_E is not None:
        left_BLE = left_BLE + aligned(jax.lax.stop_gradient(bias_E), left_BLE)
    if rule.groups > 1:
        left_BLGE = left_BLE.reshape(*left_BLE.shape[:2], rule.groups, -1)
        best = [jnp.sum(jnp.where(is_it, left_BLGE, 0.0), axis=-1) for _, is_it in _largest(left_BLGE, 2)]
        taken = [is_it for _, is_it in _largest(best[0] + best[1], rule.groups_per_token)]
        is_taken_BLG = jnp.any(jnp.stack(taken), axis=0)
        left_BLE = jnp.where(is_taken_BLG[..., None], left_BLGE, -jnp.inf).reshape(left_BLE.shape)
    ids, chosen = [], []
    for ids_BL, is_it_BLE in _largest(left_BLE, experts_per_token):
        ids.append(ids_BL)
        chosen.append(jnp.sum(jnp.where(is_it_BLE, logits_BLE, 0.0), axis=-1))
    chosen_BLK = jnp.stack(chosen, axis=-1)
    normalized = experts_per_token > 1 if rule.normalized is None else rule.normalized
    if rule.sigmoid:
        weights_BLK = jax.nn.sigmoid(chosen_BLK)
        weights_BLK = weights_BLK / jnp.sum(weights_BLK, axis=-1, keepdims=True) if normalized else weights_BLK
    elif normalized:
        weights_BLK = jax.nn.softmax(chosen_BLK, axis=-1)
    else:
        weights_BLK = jnp.exp(chosen_BLK - jax.nn.logsumexp(logits_BLE, axis=-1, keepdims=True))
    return weights_BLK if rule.scale == 1 else weights_BLK * rule.scale, jnp.stack(ids, axis=-1)


def _largest(left: Array, count: int) -> Iterator[tuple[Array, Array]]:
    """The largest numbers of the last dim [..., N], best first: int32 [...], and bool [..., N], where each one is."""
    # Argmax after argmax: on a sharded batch the partitioner gathers the batch for `jax.lax.top_k` (jax 0.12.0, CPU).
    for _ in range(count):
        ids = jnp.argmax(left, axis=-1).astype(jnp.int32)
        is_it = ids[..., None] == aligned(jnp.arange(left.shape[-1]), left)
        left = jnp.where(is_it, -jnp.inf, left)
        yield ids, is_it


def count_tokens(ids_BLK: Array, num_experts: int) -> Array:
    """Count the tokens that each expert gets: int32 [E]; an id of E or more counts for no expert."""
    one_hot_BLKE = ids_BLK[..., None] == jnp.arange(num_experts)[None, None, None]
    return jnp.sum(one_hot_BLKE, axis=(0, 1, 2), dtype=jnp.int32)


def router_loss(logits_BLE: Array, load_E: Array, *, load_balance_weight: float, router_z_weight: float) -> Array:
    """Compute the auxiliary loss of each token; its mean over the tokens that the load counts is that of the papers.

    With f_e the share of routed slots that expert e got and P_e its mean probability over the same tokens, the mean is

        load_balance_weight * E * sum_e f_e P_e  +  router_z_weight * mean(logsumexp(logits)^2).

    Any split of the tokens over devices sums to the same number.

    Source: Fedus et al. 2021 (Switch, equations 4 to 6); Zoph et al. 2022 (ST-MoE, equation 5).

    Args:
        logits_BLE: float32.
        load_E: float32, f over all tokens of the batch but padding; no gradient flows to it.
        load_balance_weight, router_z_weight: factors of the two terms.

    Returns:
        float32 [B, L].
    """
    probabilities_BLE = jax.nn.softmax(logits_BLE, axis=-1)
    load_11E = aligned(jax.lax.stop_gradient(load_E), probabilities_BLE)
    balance_BL = jnp.sum(load_11E * probabilities_BLE, axis=-1) * load_E.shape[0]
    z_BL = jax.nn.logsumexp(logits_BLE, axis=-1)
    return load_balance_weight * balance_BL + router_z_weight * z_BL**2


def level_load(bias_E: Array, load_E: Array) -> Array:
    """0, float32 [], whose gradient in `bias_E` is a multiple above 0 of the load less its mean.

    The multiple is small enough to change no norm of all gradients: only the sign is of use (`optim.balance_experts`).
    """
    excess_E = jax.lax.stop_gradient(load_E) - 1 / load_E.shape[0]
    return 2.0**-20 * jnp.sum((bias_E - jax.lax.stop_gradient(bias_E)) * aligned(excess_E, bias_E))


def sort_pairs(ids_NK: Array, num_experts: int, num_rows: int) -> tuple[Places, Array]:
    """Sort the pairs of a token and an expert by expert: places in R rows, and int32 [E], the rows of each expert.

    Ids are int32 from 0 to E; pairs of E, which stands for an expert that is elsewhere, get no row.
    """
    pairs_P = jnp.argsort(ids_NK.reshape(-1), stable=True).astype(jnp.int32)  # rows -> pairs
    rows_P = jnp.argsort(pairs_P).astype(jnp.int32)  # pairs -> rows
    group_sizes_E = count_tokens(ids_NK[None], num_experts)
    filled = jnp.sum(group_sizes_E)
    pair_R = jnp.where(jnp.arange(num_rows) < filled, pairs_P[:num_rows], ids_NK.size)
    row_NK = jnp.where(rows_P < filled, rows_P, num_rows).reshape(ids_NK.shape)
    return Places(pair_R, row_NK), group_sizes_E


def multiply_rows(x_RD: Array, group_sizes_E: Array, kernels: Kernels) -> Array:
    """Apply to each row the expert whose group it is in: [R, D], and anything in rows beyond the groups."""

    def multiply(rows: Array, kernel: Array, bias_EO: Array | None) -> Array:
        product = checkpoint_name(grouped_matmul(rows, kernel, group_sizes_E), EXPERT_PRODUCTS)
        return product if bias_EO is None else product + _of_rows(bias_EO, group_sizes_E, rows.shape[0])

    with jax.named_scope("experts"):
        gate_RF = None if kernels.gate is None else multiply(x_RD, kernels.gate, kernels.gate_bias)
        up_RF = multiply(x_RD, kernels.up, kernels.up_bias)
        h_RF = gelu(up_RF) if gate_RF is None else GATED[kernels.activation](gate_RF, up_RF)
        return multiply(checkpoint_name(h_RF, "mlp_hidden"), kernels.down, kernels.down_bias)


def _of_rows(bias_EO: Array, group_sizes_E: Array, num_rows: int) -> Array:
    """The bias of the expert of each row: [R, O], and 0 in rows beyond the groups."""
    expert_R = jnp.searchsorted(jnp.cumsum(group_sizes_E), jnp.arange(num_rows), side="right")
    # A product with ones and zeros in place of a lookup, whose gradient would be a scatter.
    is_own_RE = expert_R[:, None] == jnp.arange(bias_EO.shape[0])[None]
    return is_own_RE.astype(bias_EO.dtype) @ bias_EO


def grouped_experts(x_ND: Array, weights_NK: Array, ids_NK: Array, kernels: Kernels) -> Array:
    """Sum weight times output over the experts of each token, each expert one group of a grouped matmul.

    Nothing is dropped: the (token, expert) pairs are sorted by expert into a buffer of N * min(K, E) rows, which
    holds every routing. An id of E means an expert that is not here; such pairs have no row and give 0.

    Tokens are in the dtype of the kernels, weights float32, ids int32 and distinct for each token below E; the result
    is float32 [N, D], not rounded so that parts can be added.
    """
    (num_tokens, choices), num_experts = ids_NK.shape, kernels.up.shape[0]
    with jax.named_scope("sort_tokens"):
        places, group_sizes_E = sort_pairs(ids_NK, num_experts, num_tokens * min(choices, num_experts))
        x_RD = spread(x_ND, places)
    y_RD = multiply_rows(x_RD, group_sizes_E, kernels)
    with jax.named_scope("combine_tokens"):
        return collect(y_RD.astype(jnp.float32) * pair_values(weights_NK, places)[:, None], places)


# --- Where the rows of a buffer come from: tokens are copied into it and summed out of it. ---


def spread(x_ND: Array, places: Places) -> Array:
    """Copy each token into the rows of its pairs: [R, D] in the dtype of x, and 0 where there is no pair.

    The gradient is `collect`, and that of `collect` is `spread`: both are gathers, where autodiff would add up rows in
    a scatter, one after the other on CPU and in no fixed order on GPU.
    """
    # Tokens that every shard of experts has go to other rows on each, and their gradients are summed over the shards.
    x_ND, pair_R, row_NK = vary_alike(x_ND, *places)
    return _spread(x_ND, Places(pair_R, row_NK))


def pair_values(a_NK: Array, places: Places) -> Array:
    """The number of the pair of each row: [R], and 0 where there is no pair."""
    return a_NK.reshape(-1).at[places.pair_R].get(mode="fill", fill_value=0)


def _rows_of_tokens(x_ND: Array, places: Places) -> Array:
    choices = places.row_NK.shape[1]
    return x_ND.at[places.pair_R // choices].get(mode="fill", fill_value=0)


def _sums_of_rows(y_RD: Array, places: Places) -> Array:
    num_tokens, choices = places.row_NK.shape
    total_ND = jnp.zeros((num_tokens, y_RD.shape[1]), jnp.float32)
    for choice in range(choices):
        rows_ND = y_RD.at[places.row_NK[:, choice]].get(mode="fill", fill_value=0)
        total_ND = total_ND + rows_ND.astype(jnp.float32)
    return total_ND


@jax.custom_vjp
def _spread(x_ND: Array, places: Places) -> Array:
    return _rows_of_tokens(x_ND, places)


@jax.custom_vjp
def collect(y_RD: Array, places: Places) -> Array:
    """Sum the rows of each token's pairs: float32 [N, D]; rows without a pair may hold anything."""
    return _sums_of_rows(y_RD, places)


def _spread_forward(x_ND: Array, places: Places) -> tuple[Array, Places]:
    return _rows_of_tokens(x_ND, places), places


def _spread_backward(places: Places, gradient_RD: Array) -> tuple[Array, None]:
    return _sums_of_rows(gradient_RD, places).astype(gradient_RD.dtype), None


def _collect_forward(y_RD: Array, places: Places) -> tuple[Array, tuple[Places, Array]]:
    # A gradient has the dtype of what it is of; an empty array carries it.
    return _sums_of_rows(y_RD, places), (places, y_RD[:0])


def _collect_backward(saved: tuple[Places, Array], gradient_ND: Array) -> tuple[Array, None]:
    places, empty = saved
    return _rows_of_tokens(gradient_ND.astype(empty.dtype), places), None


_spread.defvjp(_spread_forward, _spread_backward)
collect.defvjp(_collect_forward, _collect_backward)
