"""Accumulation for a loss whose rows depend on one another (contrastive losses): two passes over the microbatches.

The first pass keeps the outputs of every microbatch and no activations. The loss of all outputs gives their gradient.
The second pass computes each microbatch again and takes its outputs' gradient back to the parameters. The gradients are
those of one large batch, in the memory of a microbatch and of all outputs.

Source: Gao et al. 2021, Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup (arXiv 2101.06983).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import constrain, path_name
from jaxtrain.models.task import Batch, TaskSums, row_dims
from jaxtrain.parallel.gradients import Accumulation, Arguments, Gradients, constrain_gradients, sum_dtype
from jaxtrain.parallel.microbatches import Tree, as_means, split_microbatches
from jaxtrain.runtime.tree import merge_leaves


@dataclass(frozen=True)
class TwoPasses:
    """What the two passes compute.

    Attributes:
        outputs: (trained params, what the loss reads besides, model_state, inputs of a microbatch, key) -> (outputs,
            model_state).
        loss: (outputs of all rows, what it reads besides, batch) -> (loss to differentiate, its sums).
    """

    outputs: Callable[[Tree, Tree, Tree, Any, jax.Array], tuple[Tree, Tree]]
    loss: Callable[[Tree, Tree, Batch], tuple[jax.Array, TaskSums]]


def global_row_gradients(passes: TwoPasses, arguments: Arguments, plan: Accumulation) -> Gradients:
    """Compute the gradients of a loss over all rows, with the model applied to one microbatch at a time."""
    params, fixed, model_state, batch, key = arguments
    count = plan.count
    size = jax.tree.leaves(batch["inputs"])[0].shape[0] // count
    inputs = split_microbatches(batch["inputs"], count)
    indices = jnp.arange(count)

    has_rows = _which_have_rows(
        lambda rows: passes.outputs(params, fixed, model_state, rows, key)[0],
        jax.tree.map(lambda x: x[0], inputs),
        size,
    )

    def apply(params: Tree, state: Tree, index: jax.Array, rows: Any) -> tuple[tuple[Tree, Tree], Tree]:
        outputs, after = passes.outputs(params, fixed, state, rows, jax.random.fold_in(key, index))
        is_float = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.inexact), outputs)
        # Those that have a gradient and the others, each with None in the places of the other.
        floats = jax.tree.map(lambda x, yes: x if yes else None, outputs, is_float)
        rest = jax.tree.map(lambda x, yes: None if yes else x, outputs, is_float)
        return (floats, rest), jax.tree.map(lambda new, old: new.astype(old.dtype), after, state)

    def first(state: Tree, microbatch: tuple[jax.Array, Any]) -> tuple[Tree, tuple[Tree, Tree]]:
        outputs, state = apply(params, state, *microbatch)
        return state, outputs

    def loss(floats: Tree, rest: Tree) -> tuple[jax.Array, TaskSums]:
        together = merge_leaves(floats, rest)
        leaves = [_merge(x, yes) for x, yes in zip(jax.tree.leaves(together), has_rows, strict=True)]
        return passes.loss(jax.tree.unflatten(jax.tree.structure(together), leaves), fixed, batch)

    last_state, (floats, rest) = jax.lax.scan(first, model_state, (indices, inputs))
    of_outputs, sums = jax.grad(loss, has_aux=True)(floats, rest)

    def second(carry: tuple[Tree, Tree], microbatch: tuple[jax.Array, Any, Tree]) -> tuple[tuple[Tree, Tree], None]:
        total, state = carry
        index, rows, of_rows = microbatch

        def outputs(params: Tree) -> tuple[Tree, Tree]:
            (floats, _), after = apply(params, state, index, rows)
            return floats, after

        _, pull, state = jax.vjp(outputs, params, has_aux=True)
        (tree,) = pull(of_rows)
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, tree)
        return (constrain_gradients(total, plan.layout, plan.zero), state), None

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, sum_dtype(leaf)), params)
    start = (constrain_gradients(zeros, plan.layout, plan.zero), model_state)
    (total, _), _ = jax.lax.scan(second, start, (indices, inputs, of_outputs))
    loss_sum, weight, metrics = sums
    total = as_means(total, weight, powers_of_two=plan.powers_of_two)
    return Gradients(total, loss_sum, weight, last_state, metrics)


def _which_have_rows(outputs: Callable[[Any], Tree], inputs: Any, size: int) -> list[bool]:
    """Whether each output of a microbatch of this size has one entry per row, or none that depends on their number."""
    dims, shapes = row_dims(outputs, inputs, size)
    for (path, leaf), dim in zip(jax.tree_util.tree_leaves_with_path(shapes), dims, strict=True):
        if dim is not None and (dim != 0 or leaf.shape[0] != size):
            raise ConfigError(
                f"rows='global' joins outputs row by row, but {path_name(path) or 'the output'} of the model has the "
                f"shape {list(leaf.shape)} for {size} rows; return outputs [rows, ...], or use accumulation_steps=1"
            )
    return [dim == 0 for dim in dims]


def _merge(stacked: jax.Array, has_rows: bool) -> jax.Array:
    """Outputs [count, size, ...] of microbatches in the order of the batch's rows, as `split_microbatches` split them.

    Outputs without rows (a learned temperature) are equal in every microbatch: their mean is each of them, and shares
    their gradient out.
    """
    if not has_rows:
        is_float = jnp.issubdtype(stacked.dtype, jnp.inexact)
        return jnp.mean(stacked, axis=0) if is_float else stacked[0]
    rows = jnp.moveaxis(stacked, 0, 1).reshape(stacked.shape[0] * stacked.shape[1], *stacked.shape[2:])
    return constrain(rows, "batch", *[None] * (rows.ndim - 1))
