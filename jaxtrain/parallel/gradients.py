"""Gradients of a batch: at once, or accumulated over microbatches and reduced over `data`.

Accumulation has two programs. On shards (inside `jax.shard_map` over `data`) nothing crosses `data` before the loop
over microbatches has ended. In automatic code the compiler places the collectives. `_choose_accumulation` chooses.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.layout.scatter import Factors, Parts, use_parts
from jaxtrain.layout.sharding import Layout, parameter_spec, path_name, use_layout
from jaxtrain.layout.stack_sums import StackSums, use_stack_sums
from jaxtrain.models.task import Batch, Sums, TaskSums, divisor
from jaxtrain.parallel.divisors import as_means, loss_constant, loss_divisor
from jaxtrain.parallel.microbatches import Tree, batch_specs, split_microbatches
from jaxtrain.parallel.reduction import DataReduction, sum_dtype
from jaxtrain.parallel.traced import calls_back, traced
from jaxtrain.runtime.compiler import note_choice

# What the loss of a microbatch gives besides the number to differentiate, which is the loss sum over the `loss_divisor`
# of the weight, times the loss scale: loss sum, weight, model_state, metric sums.
LossParts = tuple[jax.Array, jax.Array, Tree, Sums]
# (trained params, what the loss reads besides, model_state, batch, key) -> (loss to differentiate, its parts)
LossFunction = Callable[[Tree, Tree, Tree, Batch, jax.Array], tuple[jax.Array, LossParts]]
# By path, arrays of a tree of parameters.
ByPath = dict[str, jax.Array]
# (sums of the gradients of the stack, those of the other trained params, and the same arguments) -> (gradients of the
# sum over rows, of those that are in no sum yet, the other sums after this microbatch, the parts)
Differentiate = Callable[[ByPath, ByPath, Tree, Tree, Tree, Batch, jax.Array], tuple[ByPath, ByPath, LossParts]]
# The arguments of the loss -> (gradients summed over microbatches times their weights, model_state, sums)
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
    stack: str | None = None,
    powers_of_two: bool = False,
) -> Gradients:
    """Compute the gradients of the mean loss, over all microbatches.

    The differentiated loss of a microbatch is its own mean (or nearly, see `parallel/divisors.py`); the sum over
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
        stack: path of a stack of layers that the loss runs once, by `scan_stack`; None: there is none. The sums over
            microbatches take the gradient of each of its layers in the backward pass, see `layout/stack_sums.py`.
        powers_of_two: as the loss got it for its `loss_divisor`.

    Returns:
        The gradients, and the sums over the global batch.
    """
    if accumulation_steps == 1:
        tree, (loss_sum, weight, model_state, metrics) = jax.grad(loss, has_aux=True)(
            params, fixed, model_state, batch, jax.random.fold_in(key, 0)
        )
        tree = as_means(tree, weight, powers_of_two=powers_of_two)
        return Gradients(tree, loss_sum, weight, model_state, metrics)
    arguments = (params, fixed, model_state, batch, key)
    how = (accumulation_steps, layout, zero, stack, powers_of_two)
    accumulate = _choose_accumulation(loss, arguments, *how) if on_shards else _automatic(loss, *how)
    total, model_state, (loss_sum, weight, metrics) = accumulate(*arguments)
    total = jax.tree.map(lambda t: t / divisor(weight), total)
    return Gradients(total, loss_sum, weight, model_state, metrics)


def _choose_accumulation(
    loss: LossFunction,
    arguments: tuple[Tree, Tree, Tree, Batch, jax.Array],
    count: int,
    layout: Layout,
    zero: int,
    stack: str | None,
    powers_of_two: bool,
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
        stack, powers_of_two: see `compute_gradients`.
    """
    how = (count, layout, zero, stack, powers_of_two)
    automatic = _automatic(loss, *how)
    params, _, model_state, batch, _ = arguments
    if layout.mesh.shape["data"] == 1 or jax.tree.leaves(model_state):
        return automatic
    on_shards, operations = traced(_on_shards(loss, params, batch, *how), *arguments)
    if not calls_back(operations):
        return on_shards
    why = "the model or its loss calls back to Python (jax.debug.print), which jax cannot on a shard of data"
    note_choice("accumulation", "gradients cross data in every microbatch", [("once a step", why)])
    return automatic


def _automatic(
    loss: LossFunction, count: int, layout: Layout, zero: int, stack: str | None, powers_of_two: bool
) -> Accumulate:
    """Build the accumulation whose collectives the compiler places; arguments as those of `_on_shards`."""

    def keep_part(total: Tree) -> Tree:
        # With ZeRO the compiler reduces every microbatch into the part that a device keeps.
        return constrain_gradients(total, layout, zero)

    def zeros(params: Tree) -> Tree:
        return keep_part(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, sum_dtype(leaf)), params))

    inside = partial(_inside, stack=stack, layout=layout, zero=zero)
    differentiate = _differentiate(loss, None, stack, powers_of_two=powers_of_two)
    return partial(_accumulate, differentiate, keep_part, count, zeros, inside)


def _on_shards(
    loss: LossFunction,
    params: Tree,
    batch: Batch,
    count: int,
    layout: Layout,
    zero: int,
    stack: str | None,
    powers_of_two: bool,
) -> Accumulate:
    """Build the accumulation that is manual over `data`: each shard its own rows, reduced after the loop.

    Args:
        loss: of a microbatch.
        params, batch: arrays or shapes, for their specs.
        count: microbatches.
        layout: of the step.
        zero: ZeRO stage.
        stack, powers_of_two: see `compute_gradients`.

    Returns:
        A function of global arrays.
    """
    reduction = DataReduction(layout, zero, stack)
    manual = dataclasses.replace(layout, manual=layout.manual | {"data"})
    differentiate = _differentiate(
        loss,
        reduction if reduction.each_microbatch else None,
        stack,
        powers_of_two=powers_of_two,
        adds_rest=zero == 1 and stack is not None,
    )
    inside = partial(_inside, stack=stack, layout=layout, zero=zero)

    def local(params: Tree, *rest: Tree) -> tuple[Tree, Tree, TaskSums]:
        with use_layout(manual):
            total, model_state, sums = _accumulate(
                differentiate, lambda total: total, count, reduction.zeros, inside, params, *rest
            )
            finish = reduction.as_stored if reduction.each_microbatch else reduction.reduce
            total = finish(total, params)
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


def _differentiate(
    loss: LossFunction,
    reduction: DataReduction | None,
    stack: str | None,
    *,
    powers_of_two: bool,
    adds_rest: bool = False,
) -> Differentiate:
    """Build the gradients of a microbatch, of which those of the stack are added to the sums as they arise.

    Args:
        loss: of a microbatch.
        reduction: given where each device keeps its part of every microbatch's gradient, as soon as a layer's is there
            (ZeRO-2). Then shards are summed before their gradients can be weighted, so that what is differentiated is
            the sum over rows, divided by the count of targets, so that fp16 gradients keep their range.
        stack, powers_of_two: see `compute_gradients`.
        adds_rest: whether the backward pass adds the gradients outside the stack to their sums too, which a
            `reduction` does for those that it scatters.
    """

    per = partial(loss_divisor, powers_of_two=powers_of_two)

    def differentiate(
        sums: ByPath, others: ByPath, params: Tree, fixed: Tree, model_state: Tree, batch: Batch, key: jax.Array
    ) -> tuple[ByPath, ByPath, LossParts]:
        constant = loss_constant(jax.tree.leaves(batch.get("targets", batch))[0].size, powers_of_two=powers_of_two)
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        whole = {path_name(path): leaf for path, leaf in leaves}
        zeros = {} if reduction is None else _by_path(reduction.zeros(params))
        dims = {path_name(path): None if reduction is None else reduction.sum_dim(path, leaf) for path, leaf in leaves}

        def keep_part(name: str, gradient: jax.Array) -> jax.Array:
            return gradient if reduction is None else _scatter(gradient, dims[name], first_dim=1)

        def of(
            starts: ByPath, sums: ByPath, factor: jax.Array, others: ByPath, factors: Factors
        ) -> tuple[tuple[jax.Array, Any, Any], LossParts]:
            # A parameter that no dim of divides has no part: it is differentiated itself.
            chosen = [starts[name] if name in starts and dims[name] is None else leaf for name, leaf in whole.items()]
            given = {name: (part, dims[name]) for name, part in starts.items() if adds_rest or dims[name] is not None}
            parts = Parts(given, others, factors)
            with contextlib.ExitStack() as contexts:
                if given:
                    contexts.enter_context(use_parts(parts))
                passing = StackSums(stack or "", (sums, factor), keep_part)
                if sums:
                    contexts.enter_context(use_stack_sums(passing))
                mean, found = loss(jax.tree.unflatten(structure, chosen), fixed, model_state, batch, key)
            assert passing.end is not None or not sums, f"{stack} is run by scan_stack"
            mean = mean if reduction is None else mean * (per(found[1]) / constant)
            return (mean, passing.end or (sums, factor), parts.ends), found

        starts = {name: leaf if dims[name] is None else zeros[name] for name, leaf in whole.items() if name not in sums}
        unread = jnp.float32(0)
        (mean, _, ends), pull, found = jax.vjp(of, starts, sums, unread, others, (unread, unread), has_aux=True)
        # What is added to sums in the backward pass is weighted there.
        factor = per(found[1]) if reduction is None else jnp.float32(constant)
        unit = jnp.float32(1) if reduction is None else constant / per(found[1])
        attached = {name: (others[name], (unit, per(found[1]))) for name in ends}
        gradients, sums, _, others, _ = pull((jnp.ones_like(mean), (sums, factor), attached))
        sums |= {name: others[name] for name in ends}
        gradients = {name: gradient for name, gradient in gradients.items() if name not in ends}
        if reduction is not None:
            gradients = {
                name: (_scatter(g.astype(sum_dtype(g)), None) if dims[name] is None else g) * unit
                for name, g in gradients.items()
            }
        weighted = {name: g.astype(sum_dtype(g)) * per(found[1]) for name, g in gradients.items()}
        return weighted, sums, found

    return differentiate


def _accumulate(
    differentiate: Differentiate,
    keep_part: Callable[[Tree], Tree],
    count: int,
    zeros: Callable[[Tree], Tree],
    inside: Callable[[Tree], Collection[str]],
    params: Tree,
    fixed: Tree,
    model_state: Tree,
    batch: Batch,
    key: jax.Array,
) -> tuple[Tree, Tree, TaskSums]:
    """Loop over the microbatches.

    Args:
        differentiate: gradients of a microbatch.
        keep_part: the sum -> what a device keeps of it.
        count: microbatches.
        zeros: params -> the sum before the first microbatch.
        inside: params -> paths of those whose gradients are added in the backward pass.
        params, fixed, model_state, batch, key: see `compute_gradients`.

    Returns:
        Gradients weighted and summed, model_state after the last microbatch, and the sums of the loss.
    """
    structure = jax.tree.structure(params)
    summed_inside = inside(params)

    def step(carry: tuple[Tree, Tree], microbatch: tuple[jax.Array, Tree]) -> tuple[tuple[Tree, Tree], TaskSums]:
        total, state = carry
        index, rows = microbatch
        totals = _by_path(total)
        sums = {name: totals[name] for name in summed_inside}
        others = {name: total for name, total in totals.items() if name not in sums}
        weighted, sums, (loss_sum, weight, new_state, metrics) = differentiate(
            sums, others, params, fixed, state, rows, jax.random.fold_in(key, index)
        )
        # The carry keeps its dtypes, whatever dtype a model computes its state in.
        state = jax.tree.map(
            lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype), new_state, state
        )
        added = [sums[name] if name in sums else total + weighted[name] for name, total in totals.items()]
        return (keep_part(jax.tree.unflatten(structure, added)), state), (loss_sum, weight, metrics)

    start = (zeros(params), model_state)
    microbatches = (jnp.arange(count), split_microbatches(batch, count))
    (total, model_state), sums = jax.lax.scan(step, start, microbatches)
    return total, model_state, jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)


def _by_path(tree: Tree) -> ByPath:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _inside(params: Tree, *, stack: str | None, layout: Layout, zero: int) -> list[str]:
    """Paths of the parameters of a stack whose sums take the gradients of its layers one by one.

    A parameter that is sharded over its layers, as one may be whose table does not name that dim, is not among them.
    """
    if stack is None:
        return []
    also = ("data",) if zero else ()
    return [
        name
        for name, leaf in _by_path(params).items()
        if name.startswith(f"{stack}/") and not any(parameter_spec(name, leaf.shape, layout, also=also)[:1])
    ]


def _scatter(gradient: jax.Array, dim: int | None, *, first_dim: int = 0) -> jax.Array:
    """Sum over `data`, of which a device keeps its part of a dim, whose number counts from `first_dim`; None: all."""
    if dim is None:
        return jax.lax.psum(gradient, "data")
    return jax.lax.psum_scatter(gradient, "data", scatter_dimension=dim - first_dim, tiled=True)


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
