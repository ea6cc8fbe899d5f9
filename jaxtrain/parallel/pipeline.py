"""One runner for every pipeline schedule: `jax.shard_map` over `pipe` and `data`, the other axes left to the compiler.

The table of `schedules.py` says what each stage does in each tick. A tick is: store what arrived, at most one forward,
at most one backward, then pass activations up and gradients down. Only the work stands in conditionals, never the
passing: a collective-permute in a branch that some stages do not take would wait for them for ever. A backward
computes its stage again from the saved input. The last stage does not run forward at all: its backward gives the loss.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.layout.sharding import constrain_parameters
from jaxtrain.models.tasks import divisor
from jaxtrain.parallel.gradients import DataReduction, Gradients, batch_specs
from jaxtrain.parallel.stage import Pipeline, Stage, StageCode, Tree, enter, index, store
from jaxtrain.precision.policy import cast_floats


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Moving:
    """What changes from tick to tick: saved inputs, arrived gradients, what is on its way, and the sums so far."""

    inputs: Tree
    arrived: Tree
    up: Tree
    down: Tree
    outer: Tree
    stack: Tree
    sums: Any


def pipeline_gradients(
    pipeline: Pipeline,
    code: StageCode,
    merge: Callable[[Tree, Tree], Tree],
    params: Tree,
    fixed: Tree,
    batch: Tree,
    key: jax.Array,
    *,
    scale: jax.Array,
    zero: int = 0,
) -> Gradients:
    """Gradients of the mean loss over the global batch, by the pipeline's schedule.

    Args:
        pipeline: schedule, layout and stack.
        code: what stages compute.
        merge: (trained, fixed) -> parameters; both trees have None where the other has a leaf.
        params: trained parameters in the compute dtype, those outside the stack whole over `fsdp`.
        fixed: the frozen ones.
        batch: leaves [B, ...]; B divides by the microbatches and the shards of the batch.
        key: folded with the microbatch's index.
        scale: float32 [], loss scale.
        zero: ZeRO stage, see `DataReduction`.
    """
    schedule, layout, stack_name = pipeline.schedule, pipeline.layout, pipeline.stack
    tables = schedule.tables()
    ticks = {
        field.name: jnp.asarray(getattr(tables, field.name))
        for field in dataclasses.fields(tables)
        if not field.name.startswith("num_")
    }
    reduction = DataReduction(layout, zero)
    # Losses are differentiated as sums over this constant, so that fp16 gradients keep their range.
    elements = jax.tree.leaves(batch.get("targets", batch))[0].size
    constant = elements / (schedule.num_microbatches * layout.mesh.shape["data"])

    def reduced(outer_or_stack: Tree) -> Tree:
        """ZeRO-2: the part of a microbatch's gradient that this device keeps."""
        return reduction.reduce(outer_or_stack, {k: params[k] for k in outer_or_stack}) if zero >= 2 else outer_or_stack

    def local(outer: Tree, outer_fixed: Tree, stack: Tree, stack_fixed: Tree, batch: Tree, key: Any, scale: Any) -> Any:
        stage = Stage(pipeline, code, merge, (outer, outer_fixed, stack, stack_fixed, batch, key))

        def zeros(tree: Tree) -> Tree:
            return jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.float32), tree)

        def buffer(slots: int) -> Tree:
            return jax.tree.map(lambda leaf: jnp.zeros((max(slots, 1), *leaf.shape), leaf.dtype), stage.no_carry)

        def add(moving: _Moving, outer: Tree | None, chunk_gradient: Tree, chunk: jax.Array) -> _Moving:
            """The sums with one microbatch more."""
            if outer is None:
                outer = moving.outer
            else:
                outer = reduced(constrain_parameters(cast_floats(outer, jnp.float32)))
                outer = jax.tree.map(jnp.add, moving.outer, outer)
            summed = jax.tree.map(
                lambda total, g: jax.lax.dynamic_update_index_in_dim(total, total[chunk] + g, chunk, 0),
                moving.stack,
                reduced({stack_name: cast_floats(chunk_gradient, jnp.float32)})[stack_name],
            )
            return dataclasses.replace(moving, outer=outer, stack=summed)

        def backward_first(moving: _Moving, microbatch: Any, chunk: Any, carry: Tree, gradient: Tree) -> Any:
            rows = stage.rows(microbatch)

            def run(outer: Tree, stack: Tree) -> Tree:
                return stage.layers(stack, stage.embed(outer, rows, microbatch), rows, microbatch, chunk)

            outer, stack = jax.vjp(run, stage.outer, index(stage.stack, chunk))[1](gradient)
            return add(moving, outer, stack, chunk), stage.no_carry

        def backward_middle(moving: _Moving, microbatch: Any, chunk: Any, carry: Tree, gradient: Tree) -> Any:
            rows = stage.rows(microbatch)

            def run(stack: Tree, carry: Tree) -> Tree:
                return stage.layers(stack, carry, rows, microbatch, chunk)

            stack, down = jax.vjp(run, index(stage.stack, chunk), carry)[1](gradient)
            return add(moving, None, stack, chunk), down

        def backward_last(moving: _Moving, microbatch: Any, chunk: Any, carry: Tree, gradient: Tree) -> Any:
            rows = stage.rows(microbatch)

            def run(outer: Tree, stack: Tree, carry: Tree) -> tuple[jax.Array, Any]:
                sums = stage.loss(outer, stage.layers(stack, carry, rows, microbatch, chunk), rows)
                return sums[0] * (scale / constant), sums

            pulled = jax.grad(run, argnums=(0, 1, 2), has_aux=True)(stage.outer, index(stage.stack, chunk), carry)
            (outer, stack, down), sums = pulled
            moving = dataclasses.replace(moving, sums=jax.tree.map(jnp.add, moving.sums, sums))
            return add(moving, outer, stack, chunk), down

        def idle(moving: _Moving, microbatch: Any, chunk: Any, carry: Tree, gradient: Tree) -> Any:
            return moving, stage.no_carry

        def tick(moving: _Moving, row: dict[str, jax.Array]) -> tuple[_Moving, None]:
            now = {name: values[stage.number] for name, values in row.items()}
            moving = dataclasses.replace(
                moving,
                inputs=store(moving.inputs, moving.up, now["receive_slot"]),
                arrived=store(moving.arrived, moving.down, now["receive_gradient_slot"]),
            )
            microbatch, chunk = now["forward_microbatch"], jnp.maximum(now["forward_chunk"], 0)
            carry = index(moving.inputs, jnp.maximum(now["forward_slot"], 0))
            up = jax.lax.cond(
                (microbatch >= 0) & ~stage.is_last(chunk),
                stage.forward,
                lambda microbatch, chunk, carry: stage.no_carry,
                microbatch,
                chunk,
                carry,
            )
            microbatch, chunk = now["backward_microbatch"], jnp.maximum(now["backward_chunk"], 0)
            carry = index(moving.inputs, jnp.maximum(now["backward_slot"], 0))
            gradient = index(moving.arrived, jnp.maximum(now["backward_gradient_slot"], 0))
            kind = jnp.where(stage.is_first(chunk), 1, jnp.where(stage.is_last(chunk), 3, 2))
            moving, down = jax.lax.switch(
                jnp.where(microbatch >= 0, kind, 0),
                (idle, backward_first, backward_middle, backward_last),
                moving,
                microbatch,
                chunk,
                carry,
                gradient,
            )
            passed = dict(up=jax.lax.ppermute(up, "pipe", stage.up), down=jax.lax.ppermute(down, "pipe", stage.down))
            return dataclasses.replace(moving, **passed), None

        chunk_gradient = jax.eval_shape(lambda: reduced({stack_name: index(stage.stack, jnp.int32(0))}))[stack_name]
        start = _Moving(
            inputs=buffer(tables.num_slots),
            arrived=buffer(tables.num_gradient_slots),
            up=stage.no_carry,
            down=stage.no_carry,
            outer=zeros(jax.eval_shape(reduced, stage.outer)),
            stack=jax.tree.map(lambda g: jnp.zeros((stage.chunks, *g.shape), jnp.float32), chunk_gradient),
            sums=stage.no_sums,
        )
        moving, _ = jax.lax.scan(tick, start, ticks)
        outer_sum = jax.lax.psum(moving.outer, "pipe")
        total = {**outer_sum, stack_name: stage.undeal(moving.stack)}
        total = total if zero >= 2 else reduction.reduce(total, params)
        return total, jax.lax.psum(moving.sums, ("pipe", "data"))

    over_pipe, whole = PartitionSpec("pipe"), PartitionSpec()
    specs = reduction.specs(params)
    specs[stack_name] = jax.tree.map(
        lambda spec: PartitionSpec("pipe", *spec[1:]), specs[stack_name], is_leaf=lambda s: isinstance(s, PartitionSpec)
    )
    run = enter(
        pipeline,
        local,
        (whole, whole, over_pipe, over_pipe, batch_specs(batch), whole, whole),
        (specs, whole),
    )
    outer, outer_fixed = ({k: v for k, v in tree.items() if k != stack_name} for tree in (params, fixed))
    total, (loss_sum, weight, metrics) = run(
        outer, outer_fixed, params[stack_name], fixed[stack_name], batch, key, scale
    )
    total = jax.tree.map(lambda g: g * (constant / divisor(weight)), total)
    return Gradients(total, loss_sum, weight, {}, metrics)
