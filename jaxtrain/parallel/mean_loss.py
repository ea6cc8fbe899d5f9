"""The mean loss of a batch without its gradient, as often as an optimizer asks for it (a line search).

It is the loss that `compute_gradients` differentiates: the same microbatches, the same random numbers, and the same
choice between shards of `data` and automatic code. It can be differentiated itself, also twice.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.layout.sharding import Layout, use_layout
from jaxtrain.models.task import Batch, divisor
from jaxtrain.parallel.gradients import LossFunction
from jaxtrain.parallel.microbatches import Tree, batch_specs, split_microbatches
from jaxtrain.parallel.traced import calls_back, traced


def compute_mean_loss(
    loss: LossFunction,
    params: Tree,
    fixed: Tree,
    model_state: Tree,
    batch: Batch,
    key: jax.Array,
    *,
    accumulation_steps: int,
    layout: Layout,
    zero: int = 0,
    on_shards: bool = True,
    stack: str | None = None,
    powers_of_two: bool = False,
) -> jax.Array:
    """Compute the mean loss over all microbatches; arguments as those of `compute_gradients`.

    The model_state passes from one microbatch to the next as in the gradient, and is dropped at the end.

    Returns:
        float32 []: the loss without its scale.
    """
    del zero, stack, powers_of_two  # nothing is reduced here but two numbers, nor divided but by the weight of all rows
    if accumulation_steps == 1:
        _, (total, weight, _, _) = loss(params, fixed, model_state, batch, jax.random.fold_in(key, 0))
        return total / divisor(weight)
    arguments = (params, fixed, model_state, batch, key)
    sums = partial(_sums, loss, accumulation_steps)
    if on_shards and layout.mesh.shape["data"] > 1 and not jax.tree.leaves(model_state):
        by_shard, operations = traced(_on_shards(loss, batch, accumulation_steps, layout), *arguments)
        sums = sums if calls_back(operations) else by_shard
    totals, weights = sums(*arguments)
    return jnp.sum(totals) / divisor(jnp.sum(weights))


def _sums(
    loss: LossFunction, count: int, params: Tree, fixed: Tree, model_state: Tree, batch: Batch, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Loss sum and weight of each microbatch: float32 [count]."""

    # Differentiated, it keeps the activations of one microbatch, as the gradient of the step does.
    @jax.checkpoint
    def one(params: Tree, state: Tree, index: jax.Array, rows: Batch) -> tuple[jax.Array, jax.Array, Tree]:
        _, (total, weight, state, _) = loss(params, fixed, state, rows, jax.random.fold_in(key, index))
        return total, weight, state

    def step(state: Tree, microbatch: tuple[jax.Array, Tree]) -> tuple[Tree, tuple[jax.Array, jax.Array]]:
        total, weight, new = one(params, state, *microbatch)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), new, state), (total, weight)

    _, sums = jax.lax.scan(step, model_state, (jnp.arange(count), split_microbatches(batch, count)))
    return sums


def _on_shards(loss: LossFunction, batch: Batch, count: int, layout: Layout):
    """`_sums` on shards of `data`: each gives those of its own rows, float32 [count times shards]."""
    inside = dataclasses.replace(layout, manual=layout.manual | {"data"})

    def local(*arguments: Tree) -> tuple[jax.Array, jax.Array]:
        with use_layout(inside):
            return _sums(loss, count, *arguments)

    # Sums leave their shards side by side, so that no collective of ours is differentiated.
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(), batch_specs(batch), PartitionSpec()),
        out_specs=(PartitionSpec("data"), PartitionSpec("data")),
        axis_names={"data"},
        check_vma=False,
    )
