"""Experts sharded over the mesh axis `expert`: tokens are sent to their experts and back, in rounds.

The buffers of a round fit an even routing. A row is sent for each pair of a token and an expert, and comes back.

Shapes: B batch, L sequence, N tokens of a device, D embed, F hidden width, E experts, K experts per token, S shards of
experts, C rows that a device sends to a shard in one round, R rows of all shards, P pairs of a token and an expert.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxtrain.layout.manual import after, needs_order, run_manually, spec_of, vary_alike, vary_like
from jaxtrain.layout.rules import Entry, entry_axes, entry_degree
from jaxtrain.layout.sharding import Layout, current_layout, sum_over_shards
from jaxtrain.ops.experts.compute import (
    Kernels,
    Places,
    collect,
    count_tokens,
    grouped_experts,
    multiply_rows,
    pair_values,
    sort_pairs,
    spread,
)
from jaxtrain.ops.experts.rows import is_one_round, round_rows


def expert_load(ids_BLK: Array, num_experts: int, real_BL: Array | None = None) -> Array:
    """Compute the share of the routed slots that each expert got, over all devices.

    Args:
        ids_BLK: int32, experts of each token.
        num_experts: E.
        real_BL: bool, False for padding, which counts for no expert; None: there is none.

    Returns:
        float32 [E], replicated, with the sum 1 (0 where all is padding); no gradient flows through it.
    """
    if real_BL is not None:
        ids_BLK = jnp.where(real_BL[..., None], ids_BLK, num_experts)
    counts_E = sum_over_shards(count_tokens(ids_BLK, num_experts))
    total = jnp.sum(counts_E)
    total = total if real_BL is None else jnp.maximum(total, 1)
    load_E = counts_E.astype(jnp.float32) / total.astype(jnp.float32)
    return jax.lax.stop_gradient(load_E)


def experts_mlp(x_BLD: Array, weights_BLK: Array, ids_BLK: Array, kernels: Kernels) -> Array:
    """Sum weight times output over the experts of each token, on whichever device the experts are.

    No token is dropped: where tokens are sharded over `expert` they are exchanged in as many rounds as the routing
    needs, one where it is even.

    Args:
        x_BLD: tokens, sharded over "batch" and "sequence".
        weights_BLK: float32, differentiable, as from `route`.
        ids_BLK: int32, experts of each token, distinct.
        kernels: in the dtype of x; E is sharded over `expert`, F over `tensor`.

    Returns:
        [B, L, D] in the dtype of x, sharded as x.
    """
    layout = current_layout()
    if layout is None or all(layout.degree(axis) == 1 for axis in layout.mesh.axis_names):
        return _flat(grouped_experts, x_BLD, weights_BLK, ids_BLK, kernels).astype(x_BLD.dtype)
    shards = layout.degree("expert")
    tokens = PartitionSpec(*_dividing(spec_of(layout, "batch", "sequence"), x_BLD.shape, layout), None)
    into, out_of = spec_of(layout, "experts", None, "mlp"), spec_of(layout, "experts", "mlp", None)
    biases = spec_of(layout, "experts", "mlp"), spec_of(layout, "experts", None)
    specs = Kernels(into, into, out_of, biases[0], *biases, activation=kernels.activation)
    kernel_specs = jax.tree.map(lambda spec, array: spec if array is not None else None, specs, kernels)
    token_axes = {axis for entry in tokens for axis in entry_axes(entry)}
    summed = tuple(axis for axis in ("expert", "tensor") if layout.degree(axis) > 1 and axis not in token_axes)

    if kernels.down_bias is not None and "tensor" in summed:  # each shard of `tensor` adds it
        kernels = replace(kernels, down_bias=kernels.down_bias / layout.degree("tensor"))

    def local(x_BLD: Array, weights_BLK: Array, kernels: Kernels, ids_BLK: Array, shard_1: Array) -> Array:
        if "expert" in token_axes:
            y_BLD = _flat(partial(_exchanged, shards=shards), x_BLD, weights_BLK, ids_BLK, kernels)
        else:  # every shard of experts has these tokens
            num_local = kernels.up.shape[0]
            own = ids_BLK - shard_1[0] * num_local
            own = jnp.where((own >= 0) & (own < num_local), own, num_local)
            y_BLD = _flat(grouped_experts, x_BLD, weights_BLK, own, kernels)
        y_BLD = y_BLD.astype(x_BLD.dtype)
        return jax.lax.psum(y_BLD, summed) if summed else y_BLD

    return run_manually(
        local,
        layout,
        (x_BLD, weights_BLK, kernels),
        (ids_BLK, jnp.arange(shards)),
        in_specs=(tokens, tokens, kernel_specs, tokens, spec_of(layout, "experts")),
        out_specs=tokens,
    )


def _dividing(spec: PartitionSpec, shape: tuple[int, ...], layout: Layout) -> list[Entry]:
    """Replicate the dims that do not divide, as `constrain` does (a batch of one in sampling)."""
    return [entry if shape[d] % entry_degree(entry, layout.mesh.shape) == 0 else None for d, entry in enumerate(spec)]


def _flat(experts: Any, x_BLD: Array, weights_BLK: Array, ids_BLK: Array, kernels: Kernels) -> Array:
    """`grouped_experts` or `_exchanged` of local tokens: float32 [B, L, D]."""
    x_ND, weights_NK, ids_NK = (a.reshape(-1, a.shape[-1]) for a in (x_BLD, weights_BLK, ids_BLK))
    return experts(x_ND, weights_NK, ids_NK, kernels).reshape(x_BLD.shape)


# --- On local shards, manual over `expert`. ---


class _Queues(NamedTuple):
    """The pairs of a device in the order in which they are sent, a queue for each shard."""

    pair_P: Array
    start_S: Array
    count_S: Array
    shard_NK: Array
    turn_NK: Array
    local_NK: Array


def _exchanged(x_ND: Array, weights_NK: Array, ids_NK: Array, kernels: Kernels, shards: int) -> Array:
    """Sum weight times output over the experts of each token, on all devices of `expert`: float32 [N, D].

    The first round is differentiated as written. Those that follow turn as often as the longest queue of any device
    needs, so that all take part in each exchange; the backward pass computes them again. Ids are among all experts.
    """
    (num_tokens, choices), num_local = ids_NK.shape, kernels.up.shape[0]
    sizes = (num_tokens, choices, num_local * shards, shards)
    capacity = round_rows(*sizes)
    with jax.named_scope("dispatch"):
        queues = _queue(ids_NK, num_local, shards)
    first_ND = _round(capacity, 0, queues, x_ND, weights_NK, kernels)
    if is_one_round(*sizes):
        return first_ND
    num_rounds = jax.lax.pmax((jnp.max(queues.count_S) + capacity - 1) // capacity, "expert")
    leaves, tree = jax.tree.flatten(((x_ND, weights_NK, kernels), queues, first_ND))
    arguments, queues, first_ND = jax.tree.unflatten(tree, vary_alike(*leaves))
    ordered = needs_order(current_layout())
    return _further_rounds(capacity, ordered, arguments, queues, num_rounds, first_ND)


def _queue(ids_NK: Array, num_local: int, shards: int) -> _Queues:
    pair_P = jnp.argsort(ids_NK.reshape(-1), stable=True).astype(jnp.int32)
    place_NK = jnp.argsort(pair_P).astype(jnp.int32).reshape(ids_NK.shape)
    shard_NK, local_NK = ids_NK // num_local, ids_NK % num_local
    count_S = count_tokens(shard_NK[None], shards)
    start_S = jnp.cumsum(count_S) - count_S
    return _Queues(pair_P, start_S, count_S, shard_NK, place_NK - start_S[shard_NK], local_NK)


def _round(
    capacity: int, index: Array | int, queues: _Queues, x_ND: Array, weights_NK: Array, kernels: Kernels
) -> Array:
    """Exchange, multiply and return one round of the queues: the sums over its pairs, float32 [N, D]."""
    shards, num_local = queues.count_S.size, kernels.up.shape[0]

    def exchange(rows: Array) -> Array:
        parts = rows.reshape(shards, capacity, *rows.shape[1:])
        return jax.lax.all_to_all(parts, "expert", split_axis=0, concat_axis=0).reshape(rows.shape)

    with jax.named_scope("dispatch"):
        turn_SC = index * capacity + jnp.broadcast_to(jnp.arange(capacity), (shards, capacity))
        pair_SC = queues.pair_P.at[queues.start_S[:, None] + turn_SC].get(mode="clip")
        pair_R = jnp.where(turn_SC < queues.count_S[:, None], pair_SC, queues.pair_P.size).reshape(-1)
        turn_NK = queues.turn_NK - index * capacity
        is_sent_NK = (turn_NK >= 0) & (turn_NK < capacity)
        places = Places(pair_R, jnp.where(is_sent_NK, queues.shard_NK * capacity + turn_NK, pair_R.size))
        local_R = queues.local_NK.reshape(-1).at[pair_R].get(mode="fill", fill_value=num_local)
        x_RD, local_R = exchange(spread(x_ND, places)), exchange(local_R)
        # Weights meet the rows where the experts are, so that their gradients need no row that came back.
        weights_R = exchange(pair_values(weights_NK, places))
        # The rows of one device come sorted by expert, those of all devices do not.
        sorted_places, group_sizes_E = sort_pairs(local_R[:, None], num_local, local_R.size)
        x_RD = spread(x_RD, sorted_places)
    y_RD = multiply_rows(x_RD, group_sizes_E, kernels)
    with jax.named_scope("return"):
        y_RD = collect(y_RD, sorted_places) * weights_R[:, None]
        return collect(exchange(y_RD.astype(x_ND.dtype)), places)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _further_rounds(
    capacity: int, ordered: bool, arguments: tuple[Any, ...], queues: _Queues, num_rounds: Array, first_ND: Array
) -> Array:
    """Add the rounds from the second to the last to the first, one after the other."""
    return _sum_of_rounds(capacity, arguments, queues, num_rounds, first_ND)


def _sum_of_rounds(
    capacity: int, arguments: tuple[Any, ...], queues: _Queues, num_rounds: Array, first_ND: Array
) -> Array:
    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        index, y_ND = state
        # The result of `jax.vjp`, whose operations can be differentiated forward, as those of a custom VJP cannot.
        return index + 1, y_ND + jax.vjp(partial(_round, capacity, index, queues), *arguments)[0]

    start = vary_like(jnp.int32(1), num_rounds)
    with jax.named_scope("further_rounds"):
        return jax.lax.while_loop(lambda state: state[0] < num_rounds, step, (start, first_ND))[1]


def _further_rounds_forward(capacity: int, ordered: bool, *given: Any) -> tuple[Array, Any]:
    *saved, first_ND = given
    # Not `_further_rounds`, so that a gradient can be differentiated forward.
    return _sum_of_rounds(capacity, *given), (*saved, first_ND[:1, :1])


def _further_rounds_backward(
    capacity: int, ordered: bool, saved: Any, gradient_ND: Array
) -> tuple[Any, None, None, Array]:
    arguments, queues, num_rounds, first_11 = saved

    def step(state: tuple[Array, Any]) -> tuple[Array, Any]:
        index, total = state
        found = jax.vjp(partial(_round, capacity, index, queues), *arguments)[1](gradient_ND)
        return index + 1, jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, found)

    zeros = jax.tree.map(lambda a: vary_like(jnp.zeros(a.shape, jnp.float32), a), arguments)
    # Where the first round is computed again for the backward pass, these come after it, and before its gradients.
    start = vary_like(jnp.int32(1), first_11)
    start = after(start, first_11) if ordered else start
    with jax.named_scope("further_rounds"):
        end, total = jax.lax.while_loop(lambda state: state[0] < num_rounds, step, (start, zeros))
    first_ND = after(gradient_ND, end) if ordered else gradient_ND
    return jax.tree.map(lambda a, b: a.astype(b.dtype), total, arguments), None, None, first_ND


_further_rounds.defvjp(_further_rounds_forward, _further_rounds_backward)
