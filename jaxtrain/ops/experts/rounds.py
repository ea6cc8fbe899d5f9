"""Exchange of tokens with the shards of experts, in rounds of buffers that fit an even routing.

Runs on local shards, manual over `expert`. A row is sent for each pair of a token and an expert, and comes back.

Shapes: N tokens of a device, K experts per token, S shards of experts, C rows that a device sends to a shard in one
round, R rows of all shards, P pairs of a token and an expert, D embed.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.layout.manual import after, needs_order, vary_alike, vary_like
from jaxtrain.layout.sharding import current_layout
from jaxtrain.ops.experts.compute import Kernels, count_tokens, multiply_rows, sort_pairs
from jaxtrain.ops.experts.places import Places, collect, pair_values, spread
from jaxtrain.ops.experts.rows import is_one_round, round_rows


class _Queues(NamedTuple):
    """The pairs of a device in the order in which they are sent, a queue for each shard.

    Attributes:
        pair_P: int32, number of the pair at each place, the queues one after the other.
        start_S: int32, first place of each queue.
        count_S: int32, length of each queue.
        shard_NK: int32, shard of each pair.
        turn_NK: int32, place of each pair within its queue.
        local_NK: int32, the pair's expert as its shard counts.
    """

    pair_P: jax.Array
    start_S: jax.Array
    count_S: jax.Array
    shard_NK: jax.Array
    turn_NK: jax.Array
    local_NK: jax.Array


def exchanged_experts(
    x_ND: jax.Array, weights_NK: jax.Array, ids_NK: jax.Array, kernels: Kernels, shards: int
) -> jax.Array:
    """Sum weight times output over the experts of each token, which are on all devices of `expert`.

    The first round holds an even routing with room to spare, and is differentiated as written. Those that follow, in a
    loop, turn as often as the longest queue of any device needs, so that every device takes part in each exchange; the
    backward pass computes them again.

    Args:
        x_ND: tokens, in the dtype of the kernels.
        weights_NK: float32.
        ids_NK: int32, numbers among all experts, distinct for each token.
        kernels: of the experts of this device.
        shards: S, the degree of `expert`.

    Returns:
        float32 [N, D].
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
    all_ND: jax.Array = _further_rounds(capacity, ordered, arguments, queues, num_rounds, first_ND)
    return all_ND


def _queue(ids_NK: jax.Array, num_local: int, shards: int) -> _Queues:
    pair_P = jnp.argsort(ids_NK.reshape(-1), stable=True).astype(jnp.int32)
    place_NK = jnp.argsort(pair_P).astype(jnp.int32).reshape(ids_NK.shape)
    shard_NK, local_NK = ids_NK // num_local, ids_NK % num_local
    count_S = count_tokens(shard_NK[None], shards)
    start_S = jnp.cumsum(count_S) - count_S
    return _Queues(pair_P, start_S, count_S, shard_NK, place_NK - start_S[shard_NK], local_NK)


def _round(
    capacity: int,
    index: jax.Array | int,
    queues: _Queues,
    x_ND: jax.Array,
    weights_NK: jax.Array,
    kernels: Kernels,
) -> jax.Array:
    """Exchange, multiply and return one round of the queues: the sums over its pairs, float32 [N, D]."""
    shards, num_local = queues.count_S.size, kernels.up.shape[0]

    def exchange(rows: jax.Array) -> jax.Array:
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
    capacity: int,
    ordered: bool,
    arguments: tuple[Any, ...],
    queues: _Queues,
    num_rounds: jax.Array,
    first_ND: jax.Array,
) -> jax.Array:
    """Add the rounds from the second to the last to the first, one after the other."""
    return _sum_of_rounds(capacity, arguments, queues, num_rounds, first_ND)


def _sum_of_rounds(
    capacity: int, arguments: tuple[Any, ...], queues: _Queues, num_rounds: jax.Array, first_ND: jax.Array
) -> jax.Array:
    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, y_ND = state
        # The result of `jax.vjp`, whose operations can be differentiated forward, as those of a custom VJP cannot.
        return index + 1, y_ND + jax.vjp(partial(_round, capacity, index, queues), *arguments)[0]

    start = vary_like(jnp.int32(1), num_rounds)
    with jax.named_scope("further_rounds"):
        return jax.lax.while_loop(lambda state: state[0] < num_rounds, step, (start, first_ND))[1]


def _further_rounds_forward(capacity: int, ordered: bool, *given: Any) -> tuple[jax.Array, Any]:
    *saved, first_ND = given
    # Not `_further_rounds`, so that a gradient can be differentiated forward.
    return _sum_of_rounds(capacity, *given), (*saved, first_ND[:1, :1])


def _further_rounds_backward(
    capacity: int, ordered: bool, saved: Any, gradient_ND: jax.Array
) -> tuple[Any, None, None, jax.Array]:
    arguments, queues, num_rounds, first_11 = saved

    def step(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
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
