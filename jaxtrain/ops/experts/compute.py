"""Mixture of experts on one device: routing, its losses, and the experts as grouped matmuls.

Shapes: B batch, L sequence, N tokens, D embed, F hidden width, E experts, K experts per token, R rows of the grouped
matmul (one per pair of a token and an expert of this device).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.ops.activation import gelu
from jaxtrain.ops.experts.rows import grouped_rows


class Kernels(NamedTuple):
    """Weights of the experts: `up` and `gate` [E, D, F] (no gate: GELU instead of SwiGLU), `down` [E, F, D]."""

    up: jax.Array
    gate: jax.Array | None
    down: jax.Array


def route(logits_BLE: jax.Array, experts_per_token: int) -> tuple[jax.Array, jax.Array]:
    """Choose the experts of each token, and the weight of each.

    With two choices or more the weights are the softmax over the chosen logits (Jiang et al. 2024, Mixtral, section
    2.1). Over one logit that softmax is 1 and would teach the router nothing, so a single choice has its probability
    among all experts as weight (Fedus et al. 2021, Switch, equation 2).

    Each choice is an argmax over what is left: on a sharded batch `jax.lax.top_k` is a custom call that the
    partitioner gathers the batch for (jax 0.10.2 and 0.12.0, CPU), where a reduction stays local.

    Args:
        logits_BLE: float32, E replicated.
        experts_per_token: K.

    Returns:
        Weights float32 [B, L, K], differentiable in the logits, whose sum is 1 if K is 2 or more; and expert ids
        int32 [B, L, K], distinct for each token and best first.
    """
    num_experts = logits_BLE.shape[-1]
    left_BLE = jax.lax.stop_gradient(logits_BLE)
    ids, chosen = [], []
    for _ in range(experts_per_token):
        ids_BL = jnp.argmax(left_BLE, axis=-1).astype(jnp.int32)
        is_chosen_BLE = ids_BL[..., None] == jnp.arange(num_experts)
        left_BLE = jnp.where(is_chosen_BLE, -jnp.inf, left_BLE)
        ids.append(ids_BL)
        chosen.append(jnp.sum(jnp.where(is_chosen_BLE, logits_BLE, 0.0), axis=-1))
    chosen_BLK = jnp.stack(chosen, axis=-1)
    if experts_per_token == 1:
        weights_BLK = jnp.exp(chosen_BLK - jax.nn.logsumexp(logits_BLE, axis=-1, keepdims=True))
    else:
        weights_BLK = jax.nn.softmax(chosen_BLK, axis=-1)
    return weights_BLK, jnp.stack(ids, axis=-1)


def count_tokens(ids_BLK: jax.Array, num_experts: int) -> jax.Array:
    """Count the tokens that each expert gets.

    Args:
        ids_BLK: int32; an id of E or more counts for no expert.
        num_experts: E.

    Returns:
        int32 [E], exact in any order of summation.
    """
    one_hot_BLKE = ids_BLK[..., None] == jnp.arange(num_experts)
    return jnp.sum(one_hot_BLKE, axis=(0, 1, 2), dtype=jnp.int32)


def router_loss(
    logits_BLE: jax.Array, load_E: jax.Array, *, load_balance_weight: float, router_z_weight: float
) -> jax.Array:
    """Compute the auxiliary loss of each token; its mean over tokens is the loss of the papers.

    With f_e the share of routed slots that expert e got and P_e its mean probability, the mean is

        load_balance_weight * E * sum_e f_e P_e  +  router_z_weight * mean(logsumexp(logits)^2).

    A token's part is linear in its own probabilities for given f, so that tasks weight it as they weight losses, and
    any split of the tokens over devices sums to the same number. An even load makes the first term 1.

    Source: Fedus et al. 2021 (Switch, equations 4 to 6); Zoph et al. 2022 (ST-MoE, equation 5).

    Args:
        logits_BLE: float32.
        load_E: float32, f over all tokens of the batch; no gradient flows to it.
        load_balance_weight, router_z_weight: factors of the two terms.

    Returns:
        float32 [B, L].
    """
    probabilities_BLE = jax.nn.softmax(logits_BLE, axis=-1)
    balance_BL = jnp.sum(jax.lax.stop_gradient(load_E) * probabilities_BLE, axis=-1) * load_E.shape[0]
    z_BL = jax.nn.logsumexp(logits_BLE, axis=-1)
    return load_balance_weight * balance_BL + router_z_weight * z_BL**2


def _activate(up: jax.Array, gate: jax.Array | None) -> jax.Array:
    return gelu(up) if gate is None else jax.nn.silu(gate) * up


def grouped_experts(x_ND: jax.Array, weights_NK: jax.Array, ids_NK: jax.Array, kernels: Kernels) -> jax.Array:
    """Sum weight times output over the experts of each token, each expert one group of a grouped matmul.

    Nothing is dropped: the (token, expert) pairs are sorted by expert into a buffer of N * min(K, E) rows, which
    holds every routing. An id of E means an expert that is not here; such pairs sort behind all groups and give 0.

    What the grouped matmul costs depends on the backend. TPU has an instruction for it. On CPU, and on GPU in a jaxlib
    without a kernel for it, every row meets every local expert and is masked (openxla/xla#46002, jax 0.10.2): E times
    the FLOPs and a masked copy of the rows for each expert, so that many experts want many shards there.

    Args:
        x_ND: tokens, in the dtype of the kernels.
        weights_NK: float32.
        ids_NK: int32 from 0 to E; those below E are distinct for each token.
        kernels: of E experts.

    Returns:
        float32 [N, D], not rounded so that parts can be added.
    """
    (num_tokens, choices), num_experts = ids_NK.shape, kernels.up.shape[0]
    num_rows = round(grouped_rows(num_tokens, choices, num_experts))
    order = jnp.argsort(ids_NK.reshape(-1), stable=True)  # rows -> pairs
    position_NK = jnp.argsort(order).reshape(num_tokens, choices)  # pairs -> rows
    group_sizes_E = count_tokens(ids_NK[None], num_experts)
    # Backends differ in what they leave in rows beyond the groups, forward and backward, so both ends are masked.
    filled_R1 = (jnp.arange(num_rows) < jnp.sum(group_sizes_E))[:, None]

    def matmul(rows: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(rows, kernel, group_sizes_E)

    with jax.named_scope("sort_tokens"):
        x_RD = jnp.where(filled_R1, x_ND[order[:num_rows] // choices], 0)
    with jax.named_scope("experts"):
        gate_RF = None if kernels.gate is None else matmul(x_RD, kernels.gate)
        h_RF = checkpoint_name(_activate(matmul(x_RD, kernels.up), gate_RF), "mlp_hidden")
        y_RD = jnp.where(filled_R1, matmul(h_RF, kernels.down), 0)
    with jax.named_scope("combine_tokens"):
        y_ND = jnp.zeros(x_ND.shape, jnp.float32)
        for choice in range(choices):
            # Positions are a permutation: a gather here, and a scatter without collisions in the backward pass.
            rows_ND = y_RD.at[position_NK[:, choice]].get(mode="fill", fill_value=0, unique_indices=True)
            y_ND = y_ND + weights_NK[:, choice, None] * rows_ND.astype(jnp.float32)
    return y_ND
