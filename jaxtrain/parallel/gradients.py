"""Gradients of a batch: in one go, accumulated over microbatches, reduced over `data` once.

Several microbatches of a model without state are accumulated inside `jax.shard_map` over `data`, so that nothing
crosses `data` before the loop has ended. Everything else is automatic: the compiler places the collectives. So is a
model or loss that calls back to Python, which does not lower where `data` alone is manual (jax 0.10.2).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.layout.sharding import Layout, constrain, parameter_spec, path_name, use_layout
from jaxtrain.models.tasks import Sums, divisor
from jaxtrain.parallel.traced import calls_back, traced
from jaxtrain.runtime.choices import note_choice

# (trained params, what the loss reads besides, model_state, batch, key) ->
# (loss to differentiate, (loss sum, weight, model_state, metric sums))
LossFunction = Callable[[Any, Any, Any, Any, jax.Array], tuple[jax.Array, tuple[jax.Array, jax.Array, Any, Sums]]]


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

    tree: Any
    loss_sum: jax.Array
    weight: jax.Array
    model_state: Any
    metrics: Sums


def split_microbatches(batch: Any, count: int) -> Any:
    """Batch leaves [B, ...] as [count, B / count, ...]: microbatch m holds rows m, m + count, m + 2 count, ...

    Striding keeps every device's rows on that device, because a device holds a contiguous block of rows; and it gives
    the same microbatches whether B are all rows or those of one shard. A scalar goes to every microbatch.
    """

    def split(x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return jnp.broadcast_to(x, (count,))
        x = jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)
        return constrain(x, None, "batch", *[None] * (x.ndim - 2))

    return jax.tree.map(split, batch)


def batch_specs(batch: Any) -> Any:
    """Specs of a batch over a manual `data` axis: rows are sharded, scalars replicated."""
    return jax.tree.map(lambda x: PartitionSpec("data") if jnp.ndim(x) else PartitionSpec(), batch)


@dataclass(frozen=True)
class DataReduction:
    """How gradients that differ over a manual `data` axis become one: a sum, or a sum of which each shard keeps a part.

    Attributes:
        layout: of the step.
        stage: ZeRO stage; from 1 on a device keeps the part of the gradient that its optimizer state wants, and from
            2 on it does so after every microbatch, which costs communication and saves the whole gradient's memory.
    """

    layout: Layout
    stage: int

    def dim(self, path: tuple[Any, ...], leaf: Any) -> int | None:
        """The dim of a parameter whose gradient is scattered over `data`; None: it is summed whole."""
        if self.stage == 0:
            return None
        spec = parameter_spec(path_name(path), leaf.shape, self.layout, also=("data",))
        dims = [d for d, entry in enumerate(spec) if entry == "data" or (isinstance(entry, tuple) and "data" in entry)]
        return dims[0] if dims else None

    def specs(self, params: Any) -> Any:
        """Specs over `data` of what `reduce` gives."""

        def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
            dim = self.dim(path, leaf)
            return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "data")

        return jax.tree_util.tree_map_with_path(spec, params)

    def reduce(self, tree: Any, params: Any) -> Any:
        """Sum a tree of local gradients over `data`; `params` has its paths and whole shapes."""

        def one(path: tuple[Any, ...], leaf: Any, gradient: jax.Array) -> jax.Array:
            dim = self.dim(path, leaf)
            if dim is None:
                return jax.lax.psum(gradient, "data")
            return jax.lax.psum_scatter(gradient, "data", scatter_dimension=dim, tiled=True)

        return jax.tree_util.tree_map_with_path(one, params, tree)


def compute_gradients(
    loss: LossFunction,
    params: Any,
    fixed: Any,
    model_state: Any,
    batch: Any,
    key: jax.Array,
    *,
    accumulation_steps: int,
    layout: Layout,
    zero: int = 0,
) -> Gradients:
    """Gradients of the mean loss, over all microbatches.

    The differentiated loss of a microbatch is its own mean (so that fp16 gradients keep their range); the sum over
    microbatches weights each by its share of the global weight, so that the result is that of one large batch.

    Args:
        loss: see `LossFunction`.
        params: trainable parameters; the gradients have their structure.
        fixed: arrays that the loss reads besides (frozen parameters, the loss scale).
        model_state: threaded through the microbatches in order.
        batch: leaves [B, ...]; B divides by `accumulation_steps`.
        key: folded with the microbatch's index.
        accumulation_steps: microbatches.
        layout: of the step.
        zero: ZeRO stage, see `DataReduction`.
    """
    differentiate = jax.grad(loss, has_aux=True)
    if accumulation_steps == 1:
        tree, (loss_sum, weight, model_state, metrics) = differentiate(
            params, fixed, model_state, batch, jax.random.fold_in(key, 0)
        )
        return Gradients(tree, loss_sum, weight, model_state, metrics)

    def program(*, manual: bool) -> Callable[..., tuple[Any, Any, Any]]:
        return _accumulation(differentiate, params, batch, accumulation_steps, layout, zero, manual=manual)

    arguments = (params, fixed, model_state, batch, key)
    manual = layout.mesh.shape["data"] > 1 and not jax.tree.leaves(model_state)
    run = program(manual=manual)
    if manual:
        run, operations = traced(run, *arguments)
        if calls_back(operations):
            why = "the model or its loss calls back to Python (jax.debug.print), which jax cannot on a shard of data"
            note_choice("accumulation", "gradients cross data in every microbatch", [("once a step", why)])
            run = program(manual=False)
    total, model_state, (loss_sum, weight, metrics) = run(*arguments)
    total = jax.tree.map(lambda t: t / divisor(weight), total)
    return Gradients(total, loss_sum, weight, model_state, metrics)


def _sum_dtype(leaf: Any) -> Any:
    """Of a sum over microbatches: at least float32; complex numbers stay complex."""
    return jnp.promote_types(leaf.dtype, jnp.float32)


def _accumulation(
    differentiate: Callable[..., Any],
    params: Any,
    batch: Any,
    accumulation_steps: int,
    layout: Layout,
    zero: int,
    *,
    manual: bool,
) -> Callable[..., tuple[Any, Any, Any]]:
    """(params, fixed, model_state, batch, key) -> weighted gradients, model_state and sums over all microbatches.

    Args:
        differentiate: gradients of a microbatch, and what its loss gives besides.
        params, batch, accumulation_steps, layout, zero: see `compute_gradients`.
        manual: whether shards of `data` accumulate by themselves and are reduced after the loop.
    """
    reduction = DataReduction(layout, zero)
    reduce_each = manual and zero >= 2

    def accumulate(params: Any, fixed: Any, model_state: Any, batch: Any, key: jax.Array) -> tuple[Any, Any, Any]:
        def add(carry: tuple[Any, Any], microbatch: tuple[jax.Array, Any]) -> tuple[tuple[Any, Any], Any]:
            total, model_state = carry
            index, rows = microbatch
            tree, (loss_sum, weight, new_state, metrics) = differentiate(
                params, fixed, model_state, rows, jax.random.fold_in(key, index)
            )
            # The carry keeps its dtypes, whatever dtype a model computes its state in.
            model_state = jax.tree.map(
                lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype), new_state, model_state
            )
            weighted = jax.tree.map(lambda g: g.astype(_sum_dtype(g)) * divisor(weight), tree)
            weighted = reduction.reduce(weighted, params) if reduce_each else weighted
            total = keep_partial(jax.tree.map(jnp.add, total, weighted), params)
            return (total, model_state), (loss_sum, weight, metrics)

        def zeros(path: tuple[Any, ...], leaf: Any) -> jax.Array:
            shape, dim = list(leaf.shape), reduction.dim(path, leaf) if reduce_each else None
            if dim is not None:
                shape[dim] //= layout.mesh.shape["data"]
            return jnp.zeros(shape, _sum_dtype(leaf))

        start = keep_partial(jax.tree_util.tree_map_with_path(zeros, params), params)
        microbatches = (jnp.arange(accumulation_steps), split_microbatches(batch, accumulation_steps))
        (total, model_state), sums = jax.lax.scan(add, (start, model_state), microbatches)
        return total, model_state, jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)

    def keep_partial(total: Any, params: Any) -> Any:
        """ZeRO-2 in automatic code: the compiler reduces into the part that a device keeps."""
        if manual or zero < 2:
            return total
        return constrain_gradients(total, layout, zero)

    if not manual:
        return accumulate
    inside = dataclasses.replace(layout, manual=layout.manual | {"data"})

    def local(*args: Any) -> tuple[Any, Any, Any]:
        with use_layout(inside):
            total, model_state, sums = accumulate(*args)
        total = total if reduce_each else reduction.reduce(total, params)
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


def constrain_gradients(tree: Any, layout: Layout, zero: int) -> Any:
    """Gradients (or parameters) laid out as the optimizer state is: spread over `data` too from ZeRO-1 on."""
    if zero == 0 or layout.mesh.size == 1:
        return tree

    def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        spec = parameter_spec(path_name(path), leaf.shape, layout, also=("data",))
        return jax.lax.with_sharding_constraint(leaf, layout.named(spec))

    return jax.tree_util.tree_map_with_path(one, tree)
