"""Gradients of a batch: at once, or accumulated over microbatches and reduced over `data`.

Accumulation has two programs. On shards (inside `jax.shard_map` over `data`) nothing crosses `data` before the loop
over microbatches has ended. In automatic code the compiler places the collectives. `_choose_accumulation` chooses.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.layout.scatter import use_parts
from jaxtrain.layout.sharding import Layout, parameter_spec, path_name, use_layout
from jaxtrain.models.task import Batch, Sums, TaskSums, divisor
from jaxtrain.parallel.microbatches import Tree, batch_specs, split_microbatches
from jaxtrain.parallel.reduction import DataReduction, sum_dtype
from jaxtrain.parallel.traced import calls_back, traced
from jaxtrain.runtime.choices import note_choice

# What the loss of a microbatch gives besides the number to differentiate: loss sum, weight, model_state, metric sums.
LossParts = tuple[jax.Array, jax.Array, Tree, Sums]
# (trained params, what the loss reads besides, model_state, batch, key) -> (loss to differentiate, its parts)
LossFunction = Callable[[Tree, Tree, Tree, Batch, jax.Array], tuple[jax.Array, LossParts]]
# The same arguments -> (gradients of the trained params, the parts)
Differentiate = Callable[[Tree, Tree, Tree, Batch, jax.Array], tuple[Tree, LossParts]]
# The same arguments -> (gradients summed over microbatches times their weights, model_state, sums)
Accumulate = Callable[[Tree, Tree, Tree, Batch, jax.Array], tuple[Tree, Tree, TaskSums]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gradients:
    """Gradients of the mean loss over the global batch.

    Attributes:
        tree: like the trainable parameters, times the loss scale; float32 where it is a sum over microbatches.
        loss_sum, weight: float32 [], the pair whose quotient is the loss.
        model_state: after the last microbatch.
        metrics: name -> (sum, weight).
    """

    tree: Tree
    loss_sum: jax.Array
    weight: jax.Array
    model_state: Tree
    metrics: Sums


def compute_gradients(
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
) -> Gradients:
    """Compute the gradients of the mean loss, over all microbatches.

    The differentiated loss of a microbatch is its own mean (so that fp16 gradients keep their range); the sum over
    microbatches weights each by its share of the global weight, so that the result is that of one large batch.

    Args:
        loss: see `LossFunction`.
        params: trainable parameters; the gradients have their structure.
        fixed: arrays that the loss reads besides (frozen parameters, the loss scale).
        model_state: passed from one microbatch to the next, in order.
        batch: arrays [B, ...], where B divides by `accumulation_steps`.
        key: folded with the microbatch's index.
        accumulation_steps: microbatches.
        layout: of the step.
        zero: ZeRO stage, see `DataReduction`.
        on_shards: whether microbatches may be accumulated on shards of `data`, where the loss sees a shard's rows only
            and draws random numbers of these shapes.

    Returns:
        The gradients, and the sums over the global batch.
    """
    if accumulation_steps == 1:
        tree, (loss_sum, weight, model_state, metrics) = jax.grad(loss, has_aux=True)(
            params, fixed, model_state, batch, jax.random.fold_in(key, 0)
        )
        return Gradients(tree, loss_sum, weight, model_state, metrics)
    arguments = (params, fixed, model_state, batch, key)
    if on_shards:
        accumulate = _choose_accumulation(loss, arguments, accumulation_steps, layout, zero)
    else:
        accumulate = _automatic(loss, accumulation_steps, layout, zero)
    total, model_state, (loss_sum, weight, metrics) = accumulate(*arguments)
    total = jax.tree.map(lambda t: t / divisor(weight), total)
    return Gradients(total, loss_sum, weight, model_state, metrics)


def _choose_accumulation(
    loss: LossFunction,
    arguments: tuple[Tree, Tree, Tree, Batch, jax.Array],
    count: int,
    layout: Layout,
    zero: int,
) -> Accumulate:
    """Accumulate on shards of `data` where that gives the same numbers and can be compiled.

    A shard sees its own rows only: a model state that is made from the batch (batch statistics) would differ from
    shard to shard. A model or loss that calls back to Python does not lower where `data` alone is manual (jax 0.10.2).

    Args:
        loss: of a microbatch.
        arguments: of the program.
        count: microbatches.
        layout: of the step.
        zero: ZeRO stage.
    """
    automatic = _automatic(loss, count, layout, zero)
    params, _, model_state, batch, _ = arguments
    if layout.mesh.shape["data"] == 1 or jax.tree.leaves(model_state):
        return automatic
    on_shards, operations = traced(_on_shards(loss, params, batch, count, layout, zero), *arguments)
    if not calls_back(operations):
        return on_shards
    why = "the model or its loss calls back to Python (jax.debug.print), which jax cannot on a shard of data"
    note_choice("accumulation", "gradients cross data in every microbatch", [("once a step", why)])
    return automatic


def _automatic(loss: LossFunction, count: int, layout: Layout, zero: int) -> Accumulate:
    """Build the accumulation whose collectives the compiler places; arguments as those of `_on_shards`."""

    def keep_part(total: Tree) -> Tree:
        # With ZeRO the compiler reduces every microbatch into the part that a device keeps.
        return constrain_gradients(total, layout, zero)

    def zeros(params: Tree) -> Tree:
        return keep_part(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, sum_dtype(leaf)), params))

    def add(total: Tree, gradients: Tree, params: Tree) -> Tree:
        return keep_part(jax.tree.map(jnp.add, total, gradients))

    return partial(_accumulate, jax.grad(loss, has_aux=True), add, count, zeros)


def _on_shards(loss: LossFunction, params: Tree, batch: Batch, count: int, layout: Layout, zero: int) -> Accumulate:
    """Build the accumulation that is manual over `data`: each shard its own rows, reduced after the loop.

    Args:
        loss: of a microbatch.
        params, batch: arrays or shapes, for their specs.
        count: microbatches.
        layout: of the step.
        zero: ZeRO stage.

    Returns:
        A function of global arrays.
    """
    reduction = DataReduction(layout, zero)
    inside = dataclasses.replace(layout, manual=layout.manual | {"data"})

    def add(total: Tree, gradients: Tree, params: Tree) -> Tree:
        return jax.tree.map(jnp.add, total, gradients)

    differentiate = _scattered(loss, reduction) if reduction.each_microbatch else jax.grad(loss, has_aux=True)

    def local(params: Tree, *rest: Tree) -> tuple[Tree, Tree, TaskSums]:
        with use_layout(inside):
            total, model_state, sums = _accumulate(differentiate, add, count, reduction.zeros, params, *rest)
        total = total if reduction.each_microbatch else reduction.reduce(total, params)
        return total, model_state, jax.lax.psum(sums, "data")

    # Unchecked: the check would ask for casts in the loops of users' models. The sums above are the only
    # collectives, and the code is differentiated inside, never through.
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(), batch_specs(batch), PartitionSpec()),
        out_specs=(reduction.specs(params), PartitionSpec(), PartitionSpec()),
        axis_names={"data"},
        check_vma=False,
    )


def _scattered(loss: LossFunction, reduction: DataReduction) -> Differentiate:
    """Build the gradients of a microbatch of which each device has its part as soon as a layer's is there (ZeRO-2).

    Shards are summed before their gradients can be weighted, so that what is differentiated is the sum over rows. It is
    divided by the count of targets, so that fp16 gradients keep their range.
    """

    def differentiate(
        params: Tree, fixed: Tree, model_state: Tree, batch: Batch, key: jax.Array
    ) -> tuple[Tree, LossParts]:
        constant = float(jax.tree.leaves(batch.get("targets", batch))[0].size)
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        dims = [reduction.dim(path, leaf) for path, leaf in leaves]

        def of_parts(parts: list[jax.Array]) -> tuple[jax.Array, LossParts]:
            # A parameter that no dim of divides has no part: it is differentiated itself.
            chosen = [part if dim is None else leaf for (_, leaf), part, dim in zip(leaves, parts, dims, strict=True)]
            given = {
                path_name(path): (part, dim)
                for (path, _), part, dim in zip(leaves, parts, dims, strict=True)
                if dim is not None
            }
            with use_parts(given):
                mean, found = loss(jax.tree.unflatten(structure, chosen), fixed, model_state, batch, key)
            return mean * (divisor(found[1]) / constant), found

        zeros = jax.tree.leaves(reduction.zeros(params))
        starts = [leaf if dim is None else zero for (_, leaf), zero, dim in zip(leaves, zeros, dims, strict=True)]
        parts, found = jax.grad(of_parts, has_aux=True)(starts)
        # As a mean, which the caller weights.
        unit = constant / divisor(found[1])
        summed = [
            (jax.lax.psum(g.astype(sum_dtype(g)), "data") if dim is None else g) * unit
            for g, dim in zip(parts, dims, strict=True)
        ]
        return jax.tree.unflatten(structure, summed), found

    return differentiate


def _accumulate(
    differentiate: Differentiate,
    add: Callable[[Tree, Tree, Tree], Tree],
    count: int,
    zeros: Callable[[Tree], Tree],
    params: Tree,
    fixed: Tree,
    model_state: Tree,
    batch: Batch,
    key: jax.Array,
) -> tuple[Tree, Tree, TaskSums]:
    """Loop over the microbatches.

    Args:
        differentiate: gradients of a microbatch.
        add: (sum, gradients of a microbatch, params) -> sum.
        count: microbatches.
        zeros: params -> the sum before the first microbatch.
        params, fixed, model_state, batch, key: see `compute_gradients`.

    Returns:
        Gradients weighted and summed, model_state after the last microbatch, and the sums of the loss.
    """

    def step(carry: tuple[Tree, Tree], microbatch: tuple[jax.Array, Tree]) -> tuple[tuple[Tree, Tree], TaskSums]:
        total, state = carry
        index, rows = microbatch
        tree, (loss_sum, weight, new_state, metrics) = differentiate(
            params, fixed, state, rows, jax.random.fold_in(key, index)
        )
        # The carry keeps its dtypes, whatever dtype a model computes its state in.
        state = jax.tree.map(
            lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype), new_state, state
        )
        weighted = jax.tree.map(lambda g: g.astype(sum_dtype(g)) * divisor(weight), tree)
        return (add(total, weighted, params), state), (loss_sum, weight, metrics)

    start = (zeros(params), model_state)
    microbatches = (jnp.arange(count), split_microbatches(batch, count))
    (total, model_state), sums = jax.lax.scan(step, start, microbatches)
    return total, model_state, jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)


def constrain_gradients(tree: Tree, layout: Layout, zero: int) -> Tree:
    """Shard gradients (or parameters) as the optimizer state is: over `data` too from ZeRO-1 on.

    Args:
        tree: like the trainable parameters.
        layout: of the step.
        zero: ZeRO stage; without ZeRO the tree stays as it is.
    """
    if zero == 0 or layout.mesh.size == 1:
        return tree

    def one(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
        spec = parameter_spec(path_name(path), leaf.shape, layout, also=("data",))
        return jax.lax.with_sharding_constraint(leaf, layout.named(spec))

    return jax.tree_util.tree_map_with_path(one, tree)
