"""Gradients of a batch: at once, or accumulated over microbatches and reduced over `data`.

Accumulation has two programs. On shards (inside `jax.shard_map` over `data`) nothing crosses `data` before the loop
over microbatches has ended. In automatic code the compiler places the collectives. Each microbatch's gradient is
weighted by its rows; the average over the global batch is the one division at the end of `compute_gradients`.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.layout.keys import microbatch_key
from jaxtrain.layout.rules import entry_axes
from jaxtrain.layout.scatter import Factors, Parts, StackSums, scatter_in_pieces, use_parts, use_stack_sums
from jaxtrain.layout.sharding import Layout, path_name, state_spec, use_layout
from jaxtrain.models.task import Batch, Sums, TaskSums, divisor
from jaxtrain.parallel.microbatches import (
    Tree,
    as_means,
    batch_specs,
    loss_constant,
    loss_divisor,
    split_microbatches,
)
from jaxtrain.runtime.tree import paths_of

# What the loss of a microbatch gives besides the number to differentiate, which is the loss sum over the `loss_divisor`
# of the weight, times the loss scale: loss sum, weight, model_state, metric sums.
LossParts = tuple[jax.Array, jax.Array, Tree, Sums]
# (trained params, what the loss reads besides, model_state, batch, key) -> (loss to differentiate, its parts)
LossFunction = Callable[[Tree, Tree, Tree, Batch, jax.Array], tuple[jax.Array, LossParts]]
# By path, arrays of a tree of parameters.
ByPath = dict[str, jax.Array]


class Arguments(NamedTuple):
    """What the loss of a step takes.

    Attributes:
        params: trainable parameters; the gradients have their structure.
        fixed: arrays that the loss reads besides (frozen parameters, the loss scale).
        model_state: passed from one microbatch to the next, in order.
        batch: arrays [B, ...], where B divides by the microbatches.
        key: of the step, or of a microbatch of it.
    """

    params: Tree
    fixed: Tree
    model_state: Tree
    batch: Batch
    key: jax.Array


# (sums of the gradients of the stack, those of the other trained params, the loss's arguments) -> (gradients of the
# sum over rows, of those that are in no sum yet, the other sums after this microbatch, the parts)
Differentiate = Callable[[ByPath, ByPath, Arguments], tuple[ByPath, ByPath, LossParts]]


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


@dataclass(frozen=True)
class DataReduction:
    """A sum over a manual `data` axis, or a sum of which each shard keeps a part.

    Attributes:
        layout: of the step.
        stage: ZeRO stage; from 1 on a device keeps the part of the gradient that its optimizer state needs, and from
            2 on it does so in every microbatch, which costs communication and saves the memory of the full gradient.
    """

    layout: Layout
    stage: int

    @property
    def each_microbatch(self) -> bool:
        """Whether every microbatch's gradient is reduced by itself, not their sum."""
        return self.stage >= 2

    def dim(self, name: str, leaf: Any) -> int | None:
        """Return the dim of a parameter (global shape) over which its gradient is scattered; None: all keep the sum."""
        if self.stage == 0:
            return None
        spec = state_spec(name, leaf.shape, self.layout)
        return next((dim for dim, entry in enumerate(spec) if "data" in entry_axes(entry)), None)

    def specs(self, params: Tree) -> Tree:
        """Return the specs over `data` of what `reduce` returns for these parameters."""

        def spec(name: str, leaf: jax.Array) -> PartitionSpec:
            dim = self.dim(name, leaf)
            return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "data")

        return _map_named(spec, params)

    def reduce(self, tree: Tree, params: Tree) -> Tree:
        """Sum local gradients over `data`: the sums, and each device's part of those that are scattered.

        Args:
            tree: gradients of this shard's rows.
            params: arrays or shapes with the paths of the gradients and their global shapes.
        """

        def one(name: str, leaf: jax.Array, gradient: jax.Array) -> jax.Array:
            dim = self.dim(name, leaf)
            return jax.lax.psum(gradient, "data") if dim is None else scatter_in_pieces(gradient, dim)

        return _map_named(one, params, tree)

    def zeros(self, params: Tree) -> Tree:
        """Return sums of gradients before the first microbatch, in the shapes that a device accumulates in."""

        def zero(name: str, leaf: jax.Array) -> jax.Array:
            shape, dim = list(leaf.shape), self.dim(name, leaf) if self.each_microbatch else None
            if dim is not None:
                shape[dim] //= self.layout.mesh.shape["data"]
            return jnp.zeros(shape, sum_dtype(leaf))

        return _map_named(zero, params)


@dataclass(frozen=True)
class Accumulation:
    """How the gradients of a step are summed.

    Attributes:
        count: microbatches.
        layout: of the step.
        zero: ZeRO stage, see `DataReduction`.
        on_shards: whether microbatches may be accumulated on shards of `data`, where the loss sees a shard's rows only
            and draws random numbers of these shapes. A model state (batch statistics) would differ between shards, so
            that with one the compiler places the collectives.
        stack: path of a stack of layers that the loss runs once, by `scan_stack`; None: there is none. The sums over
            microbatches take the gradient of each of its layers in the backward pass, see `layout/scatter.py`.
        powers_of_two: as the loss got it for its `loss_divisor`.
    """

    count: int
    layout: Layout
    zero: int = 0
    on_shards: bool = True
    stack: str | None = None
    powers_of_two: bool = False

    def divisor(self, weight: jax.Array) -> jax.Array:
        return loss_divisor(weight, powers_of_two=self.powers_of_two)

    def summed_inside(self, params: Tree) -> list[str]:
        """Return paths of the parameters of a stack whose sums take the gradients of its layers one by one.

        A parameter that is sharded over its layers, as one may be whose table does not name that dim, is not among
        them.
        """
        if self.stack is None:
            return []
        return [
            name
            for name, leaf in paths_of(params).items()
            if name.startswith(f"{self.stack}/") and not any(state_spec(name, leaf.shape, self.layout)[:1])
        ]


def compute_gradients(loss: LossFunction, arguments: Arguments, plan: Accumulation) -> Gradients:
    """Compute the gradients of the mean loss, over all microbatches, and the sums over the global batch.

    The differentiated loss of a microbatch is its own mean (or nearly, see `parallel/microbatches.py`); the sum over
    microbatches weights each by its share of the global weight, so that the result is that of one large batch.
    """
    if plan.count == 1:
        tree, (loss_sum, weight, model_state, metrics) = jax.grad(loss, has_aux=True)(*arguments)
        tree = as_means(tree, weight, powers_of_two=plan.powers_of_two)
        return Gradients(tree, loss_sum, weight, model_state, metrics)
    run = partial(_automatic, loss, plan)
    if plan.on_shards and plan.layout.mesh.shape["data"] > 1 and not jax.tree.leaves(arguments.model_state):
        run = partial(_on_shards, loss, plan)
    total, model_state, (loss_sum, weight, metrics) = run(arguments)
    # The sums become the average over the global batch.
    total = jax.tree.map(lambda t: t / divisor(weight), total)
    return Gradients(total, loss_sum, weight, model_state, metrics)


def _automatic(loss: LossFunction, plan: Accumulation, arguments: Arguments) -> tuple[Tree, Tree, TaskSums]:
    """Accumulate in code whose collectives the compiler places."""

    def keep_part(total: Tree) -> Tree:
        # With ZeRO the compiler reduces every microbatch into the part that a device keeps.
        return constrain_gradients(total, plan.layout)

    zeros = keep_part(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, sum_dtype(leaf)), arguments.params))
    return _accumulate(plan, _differentiate(loss, plan, None), keep_part, zeros, arguments)


def _on_shards(loss: LossFunction, plan: Accumulation, arguments: Arguments) -> tuple[Tree, Tree, TaskSums]:
    """Accumulate in code that is manual over `data`: each shard its own rows, reduced after the loop."""
    layout = plan.layout
    reduction = DataReduction(layout, plan.zero)
    manual = dataclasses.replace(layout, manual=layout.manual | {"data"})
    adds_rest = plan.zero == 1 and plan.stack is not None
    differentiate = _differentiate(loss, plan, reduction if reduction.each_microbatch else None, adds_rest=adds_rest)

    def local(*local_arguments: Any) -> tuple[Tree, Tree, TaskSums]:
        arguments = Arguments(*local_arguments)
        params = arguments.params
        with use_layout(manual):
            zeros = reduction.zeros(params)
            total, model_state, sums = _accumulate(plan, differentiate, lambda total: total, zeros, arguments)
            total = total if reduction.each_microbatch else reduction.reduce(total, params)
        return total, model_state, jax.lax.psum(sums, "data")

    # Unchecked: the check would ask for casts in the loops of users' models. The sums above are the only
    # collectives, and the code is differentiated inside, never through.
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(), batch_specs(arguments.batch), PartitionSpec()),
        out_specs=(reduction.specs(arguments.params), PartitionSpec(), PartitionSpec()),
        axis_names={"data"},
        check_vma=False,
    )(*arguments)


def _differentiate(
    loss: LossFunction, plan: Accumulation, reduction: DataReduction | None, *, adds_rest: bool = False
) -> Differentiate:
    """Build the gradients of a microbatch, of which those of the stack are added to the sums as they arise.

    Args:
        loss: what is differentiated.
        plan: of the sums.
        reduction: given where each device keeps its part of every microbatch's gradient, as soon as a layer's is there
            (ZeRO-2). Then shards are summed before their gradients can be weighted, so that what is differentiated is
            the sum over rows, divided by the count of targets, so that fp16 gradients keep their range.
        adds_rest: whether the backward pass adds the gradients outside the stack to their sums too, which a
            `reduction` does for those that it scatters.
    """

    def differentiate(sums: ByPath, others: ByPath, arguments: Arguments) -> tuple[ByPath, ByPath, LossParts]:
        params, fixed, model_state, batch, key = arguments
        constant = loss_constant(jax.tree.leaves(batch.get("targets", batch))[0].size, powers_of_two=plan.powers_of_two)
        leaves = paths_of(params)
        structure = jax.tree.structure(params)
        zeros: ByPath = {}
        dims: dict[str, int | None] = dict.fromkeys(leaves)
        if reduction is not None:
            zeros = paths_of(reduction.zeros(params))
            dims = {name: reduction.dim(name, leaf) for name, leaf in leaves.items()}

        def keep_part(name: str, gradient: jax.Array) -> jax.Array:
            return gradient if reduction is None else _scatter(gradient, dims[name], first_dim=1)

        def differentiated(
            starts: ByPath, sums: ByPath, factor: jax.Array, others: ByPath, factors: Factors
        ) -> tuple[tuple[jax.Array, Any, Any], LossParts]:
            chosen = []
            for name, leaf in leaves.items():
                # Parameters without a dimension that `data` divides are differentiated directly.
                is_direct = name in starts and dims[name] is None
                chosen.append(starts[name] if is_direct else leaf)
            pieces = {name: (part, dims[name]) for name, part in starts.items() if adds_rest or dims[name] is not None}
            parts = Parts(pieces, others, factors)
            stack_sums = StackSums(plan.stack or "", (sums, factor), keep_part)
            with contextlib.ExitStack() as contexts:
                if pieces:
                    contexts.enter_context(use_parts(parts))
                if sums:
                    contexts.enter_context(use_stack_sums(stack_sums))
                mean, loss_parts = loss(jax.tree.unflatten(structure, chosen), fixed, model_state, batch, key)
            assert stack_sums.end is not None or not sums, f"{plan.stack} is run by scan_stack"
            if reduction is not None:
                mean = mean * (plan.divisor(loss_parts[1]) / constant)
            return (mean, stack_sums.end or (sums, factor), parts.ends), loss_parts

        starts = {}
        for name, leaf in leaves.items():
            if name not in sums:
                starts[name] = leaf if dims[name] is None else zeros[name]
        # The values of factors are not read: what is pulled back through them is the factor of the sums.
        unread = jnp.float32(0)
        (mean, _, ends), pull, loss_parts = jax.vjp(
            differentiated, starts, sums, unread, others, (unread, unread), has_aux=True
        )
        weight = loss_parts[1]
        # What is added to sums in the backward pass is weighted there.
        if reduction is None:
            factor = plan.divisor(weight)
            unit = jnp.float32(1)
        else:
            factor = jnp.float32(constant)
            unit = constant / plan.divisor(weight)
        attached = {name: (others[name], (unit, plan.divisor(weight))) for name in ends}
        gradients, sums, _, others, _ = pull((jnp.ones_like(mean), (sums, factor), attached))
        sums |= {name: others[name] for name in ends}
        weighted = {}
        for name, gradient in gradients.items():
            if name in ends:
                continue
            gradient = gradient.astype(sum_dtype(gradient))
            if reduction is not None:
                gradient = (_scatter(gradient, None) if dims[name] is None else gradient) * unit
            weighted[name] = gradient * plan.divisor(weight)
        return weighted, sums, loss_parts

    return differentiate


def _accumulate(
    plan: Accumulation,
    differentiate: Differentiate,
    keep_part: Callable[[Tree], Tree],
    zeros: Tree,
    arguments: Arguments,
) -> tuple[Tree, Tree, TaskSums]:
    """Loop over the microbatches.

    Args:
        plan: their number, and the stack.
        differentiate: gradients of a microbatch.
        keep_part: the sum -> what a device keeps of it.
        zeros: the sum before the first microbatch.
        arguments: of the loss, for the whole batch.

    Returns:
        Gradients weighted and summed, model_state after the last microbatch, and the sums of the loss.
    """
    params, fixed, model_state, batch, key = arguments
    summed_inside = plan.summed_inside(params)

    def step(carry: tuple[Tree, Tree], microbatch: tuple[jax.Array, Tree]) -> tuple[tuple[Tree, Tree], TaskSums]:
        total, state = carry
        index, rows = microbatch
        totals = paths_of(total)
        sums = {name: totals[name] for name in summed_inside}
        others = {name: total for name, total in totals.items() if name not in sums}
        weighted, sums, (loss_sum, weight, new_state, metrics) = differentiate(
            sums, others, Arguments(params, fixed, state, rows, microbatch_key(key, index, microbatches))
        )
        # The carry keeps its dtypes, whatever dtype a model computes its state in.
        state = jax.tree.map(
            lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype), new_state, state
        )
        added = [sums[name] if name in sums else total + weighted[name] for name, total in totals.items()]
        return (keep_part(jax.tree.unflatten(jax.tree.structure(params), added)), state), (loss_sum, weight, metrics)

    microbatches = split_microbatches(batch, plan.count)
    (total, model_state), sums = jax.lax.scan(step, (zeros, model_state), (jnp.arange(plan.count), microbatches))
    return total, model_state, jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)


def _map_named(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Map a function over trees as `jax.tree.map` does; it gets the name of the path first."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(path_name(path), *leaves), tree, *rest)


def sum_dtype(leaf: jax.Array) -> jnp.dtype:
    """Return the dtype of a sum over microbatches: at least float32; complex numbers stay complex."""
    return jnp.promote_types(leaf.dtype, jnp.float32)


def _scatter(gradient: jax.Array, dim: int | None, *, first_dim: int = 0) -> jax.Array:
    """Sum over `data`; a device keeps its part of a dim, which is counted from `first_dim` (None: the whole sum)."""
    if dim is None:
        return jax.lax.psum(gradient, "data")
    return jax.lax.psum_scatter(gradient, "data", scatter_dimension=dim - first_dim, tiled=True)


def constrain_gradients(tree: Tree, layout: Layout) -> Tree:
    """Shard gradients or parameters as the optimizer state is: from ZeRO-1 on, over `data` too."""
    if not layout.state_axes or layout.mesh.size == 1:
        return tree

    def one(name: str, leaf: jax.Array) -> jax.Array:
        spec = state_spec(name, leaf.shape, layout)
        return jax.lax.with_sharding_constraint(leaf, layout.named(spec))

    return _map_named(one, tree)
