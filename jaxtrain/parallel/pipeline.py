"""One runner for every pipeline schedule: `jax.shard_map` over `pipe` and `data`, the other axes left to the compiler.

`pipeline_gradients` trains, `pipeline_sums` evaluates. The table of `schedules.py` says what each stage does in each
tick: store what arrived, at most one forward, at most one backward, then send activations up and gradients down.
Computing is inside `lax.cond`, sending never is: if only some stages ran a collective-permute, they would wait for the
others forever. A backward first computes the forward of its stage again from the saved input. The last stage has no
separate forward: its backward computes the loss too.

To follow one microbatch: `_store_arrivals` and `_forward` on each stage in turn, `_backward_last` on the last one, then
`_store_arrivals` and `_backward_middle` on each stage down to `_backward_first`; `_send` takes it from stage to stage.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.layout.gather import constrain_parameters
from jaxtrain.layout.manual import turn_of
from jaxtrain.models.task import TaskSums, divisor
from jaxtrain.parallel import stage as on_stage
from jaxtrain.parallel.gradients import DataReduction, Gradients
from jaxtrain.parallel.microbatches import Tree, batch_specs, loss_constant
from jaxtrain.parallel.schedules import Tables
from jaxtrain.parallel.stage import Pipeline, Stage, StageCode
from jaxtrain.precision.policy import cast_floats


class _Tick(NamedTuple):
    """The row of a tick in the arrays of `schedules.Tables`: int32 [stages], or [] of one stage."""

    forward_microbatch: jax.Array
    forward_chunk: jax.Array
    forward_slot: jax.Array
    receive_slot: jax.Array
    backward_microbatch: jax.Array
    backward_chunk: jax.Array
    backward_slot: jax.Array
    receive_gradient_slot: jax.Array
    backward_gradient_slot: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Moving:
    """What changes from tick to tick on one device.

    Attributes:
        inputs: carries saved for their backward, arrays [slots, ...].
        arrived: gradients of carries, arrays [gradient slots, ...].
        up: the carry that the stage before has sent.
        down: the gradient that the next stage has sent.
        outer: float32 sums of the gradients of parameters outside the stack.
        stack: those of the chunks that this stage runs, arrays [v, n, ...].
        sums: of the loss.
    """

    inputs: Tree
    arrived: Tree
    up: Tree
    down: Tree
    outer: Tree
    stack: Tree
    sums: TaskSums


class _Given(NamedTuple):
    """What a backward starts from: microbatch and chunk int32 [], the saved carry, and the gradient of its output."""

    microbatch: jax.Array
    chunk: jax.Array
    carry: Tree
    gradient: Tree


@dataclass(frozen=True)
class _Work:
    """What every tick reads and none changes, on one device.

    Attributes:
        stage: what the device holds of the model and of the batch.
        no_carry: what it sends when it has nothing to send.
        reduction: over `data`.
        shapes: trained parameters with their global shapes.
        scale: float32 [], loss scale.
        constant: what loss sums are divided by before they are differentiated.
    """

    stage: Stage
    no_carry: Tree
    reduction: DataReduction
    shapes: Tree
    scale: jax.Array
    constant: float


def pipeline_gradients(
    pipeline: Pipeline,
    code: StageCode,
    params: Tree,
    fixed: Tree,
    batch: Tree,
    key: jax.Array,
    scale: jax.Array,
    *,
    powers_of_two: bool = False,
) -> Gradients:
    """Compute the gradients of the mean loss over the global batch, by the pipeline's schedule.

    Args:
        pipeline: schedule, layout and stack.
        code: what stages compute.
        params: trained parameters in the compute dtype; those outside the layer stack are already gathered over `fsdp`.
        fixed: the frozen ones. Where one tree has an array, the other has None.
        batch: arrays [B, ...]; B divides by the microbatches and the shards of the batch.
        key: random key of the step.
        scale: float32 [], loss scale.
        powers_of_two: whether losses are differentiated over a power of two, see `microbatches.py`.

    Returns:
        Gradients sharded over `pipe`, and over `data` as `DataReduction` says.
    """
    reduction = DataReduction(pipeline.layout, pipeline.zero)
    # Losses are differentiated as sums over this constant, so that fp16 gradients keep their range.
    elements = jax.tree.leaves(batch.get("targets", batch))[0].size
    share = elements / (pipeline.schedule.num_microbatches * pipeline.layout.mesh.shape["data"])
    constant = loss_constant(share, powers_of_two=powers_of_two)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    over_pipe, everywhere = PartitionSpec("pipe"), PartitionSpec()
    run = on_stage.enter(
        pipeline,
        partial(_local_gradients, pipeline, code, reduction, shapes, constant),
        (everywhere, everywhere, over_pipe, over_pipe, batch_specs(batch), everywhere, everywhere),
        (_gradient_specs(pipeline, reduction, params), everywhere),
    )
    (outer, stack), (outer_fixed, stack_fixed) = (_without_stack(pipeline, tree) for tree in (params, fixed))
    total, (loss_sum, weight, metrics) = run(outer, outer_fixed, stack, stack_fixed, batch, key, scale)
    total = jax.tree.map(lambda g: g * (constant / divisor(weight)), total)
    return Gradients(total, loss_sum, weight, {}, metrics)


def _without_stack(pipeline: Pipeline, tree: Tree) -> tuple[Tree, Tree]:
    """Return the parameters outside the stack, and those of the stack."""
    return {name: value for name, value in tree.items() if name != pipeline.stack}, tree[pipeline.stack]


def _gradient_specs(pipeline: Pipeline, reduction: DataReduction, params: Tree) -> Tree:
    """Return the specs over `pipe` and `data` of the gradients: each stage has those of the layers that it stores."""
    specs = reduction.specs(params)
    specs[pipeline.stack] = jax.tree.map(
        lambda spec: PartitionSpec("pipe", *spec[1:]),
        specs[pipeline.stack],
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
    return specs


def _local_gradients(
    pipeline: Pipeline,
    code: StageCode,
    reduction: DataReduction,
    shapes: Tree,
    constant: float,
    *arguments: Tree,
) -> tuple[Tree, TaskSums]:
    """Run every tick on one device, then sum over stages and shards; `arguments` are those of `run` in the caller."""
    *held, scale = arguments
    stage = on_stage.make_stage(pipeline, code, tuple(held))
    no_carry = on_stage.empty_carry(stage)
    work = _Work(stage, no_carry, reduction, shapes, scale, constant)
    tables = pipeline.schedule.tables()
    ticks = _Tick(*(jnp.asarray(getattr(tables, name)) for name in _Tick._fields))
    moving, _ = jax.lax.scan(partial(_tick, work), _start(work, tables), ticks)
    outer = jax.lax.psum(moving.outer, "pipe")
    total = {**outer, pipeline.stack: on_stage.undeal(stage, moving.stack)}
    total = total if reduction.each_microbatch else reduction.reduce(total, shapes)
    return total, jax.lax.psum(moving.sums, ("pipe", "data"))


def _start(work: _Work, tables: Tables) -> _Moving:
    """Return what a device has before the first tick: empty buffers and sums of 0."""
    stage, name = work.stage, work.stage.pipeline.stack

    def buffer(slots: int) -> Tree:
        return jax.tree.map(lambda leaf: jnp.zeros((max(slots, 1), *leaf.shape), leaf.dtype), work.no_carry)

    outer = jax.eval_shape(lambda: _kept(work, stage.outer))
    chunk = jax.eval_shape(lambda: _kept(work, {name: on_stage.index(stage.stack, jnp.int32(0))}))[name]
    return _Moving(
        inputs=buffer(tables.num_slots),
        arrived=buffer(tables.num_gradient_slots),
        up=work.no_carry,
        down=work.no_carry,
        outer=jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.float32), outer),
        stack=jax.tree.map(lambda g: jnp.zeros((stage.num_chunks, *g.shape), jnp.float32), chunk),
        sums=on_stage.empty_sums(stage, work.no_carry),
    )


# --- One tick. ---


def _tick(work: _Work, moving: _Moving, row: _Tick) -> tuple[_Moving, None]:
    """Do what the schedule says for this stage in one tick."""
    tick = _Tick(*(values[work.stage.number] for values in row))
    moving = _store_arrivals(moving, tick)
    up, turn = _forward(work, moving, tick)
    moving, down = _backward(work, moving, tick, turn)
    return _send(work, moving, up, down), None


def _store_arrivals(moving: _Moving, tick: _Tick) -> _Moving:
    """Put what the neighbours have sent into the slots that the schedule gives it."""
    return dataclasses.replace(
        moving,
        inputs=on_stage.store(moving.inputs, moving.up, tick.receive_slot),
        arrived=on_stage.store(moving.arrived, moving.down, tick.receive_gradient_slot),
    )


def _forward(work: _Work, moving: _Moving, tick: _Tick) -> tuple[Tree, jax.Array | None]:
    """Return what this stage sends up, and on CPU devices a 0 that is there as soon as that is.

    The last virtual stage computes its forward in its backward.
    """

    layout = work.stage.pipeline.layout

    def forward(microbatch: jax.Array, chunk: jax.Array, carry: Tree) -> tuple[Tree, jax.Array | None]:
        return on_stage.forward(work.stage, microbatch, chunk, carry), turn_of(microbatch, layout)

    microbatch, chunk = tick.forward_microbatch, jnp.maximum(tick.forward_chunk, 0)
    carry = on_stage.index(moving.inputs, jnp.maximum(tick.forward_slot, 0))
    return jax.lax.cond(
        (microbatch >= 0) & ~on_stage.is_last(work.stage, chunk),
        forward,
        lambda microbatch, chunk, carry: (work.no_carry, turn_of(chunk, layout)),
        microbatch,
        chunk,
        carry,
    )


def _backward(work: _Work, moving: _Moving, tick: _Tick, turn: jax.Array | None) -> tuple[_Moving, Tree]:
    """Add the gradients of this tick's backward to the sums, and compute what this stage sends down.

    Both passes embed tokens, with a sum over `tensor`: so that two such sums do not meet on CPU devices, the backward
    waits there for `turn`, a 0.
    """
    stage, chunk = work.stage, jnp.maximum(tick.backward_chunk, 0)
    given = _Given(
        tick.backward_microbatch,
        chunk,
        on_stage.index(moving.inputs, jnp.maximum(tick.backward_slot, 0)),
        on_stage.index(moving.arrived, jnp.maximum(tick.backward_gradient_slot, 0)),
    )
    kind = jnp.where(on_stage.is_first(stage, chunk), 1, jnp.where(on_stage.is_last(stage, chunk), 3, 2))
    branches = (_idle, _backward_first, _backward_middle, _backward_last)
    kind = jnp.where(given.microbatch >= 0, kind, 0)
    kind = kind if turn is None else kind + turn
    return jax.lax.switch(kind, [partial(branch, work) for branch in branches], moving, given)


def _idle(work: _Work, moving: _Moving, given: _Given) -> tuple[_Moving, Tree]:
    return moving, work.no_carry


def _backward_first(work: _Work, moving: _Moving, given: _Given) -> tuple[_Moving, Tree]:
    """Run the first virtual stage backward: through its layers and the embedding; nothing is sent down."""
    stage, (microbatch, chunk, _, gradient) = work.stage, given
    rows = on_stage.rows_of(stage, microbatch)

    def run(outer: Tree, stack: Tree) -> Tree:
        carry = on_stage.embed(stage, outer, rows, microbatch)
        return on_stage.layers(stage, stack, carry, rows, microbatch, chunk)

    outer, stack = jax.vjp(run, stage.outer, on_stage.index(stage.stack, chunk))[1](gradient)
    return _add(work, moving, outer, stack, chunk), work.no_carry


def _backward_middle(work: _Work, moving: _Moving, given: _Given) -> tuple[_Moving, Tree]:
    """Run a virtual stage between the first and the last backward: through its layers."""
    stage, (microbatch, chunk, carry, gradient) = work.stage, given
    rows = on_stage.rows_of(stage, microbatch)

    def run(stack: Tree, carry: Tree) -> Tree:
        return on_stage.layers(stage, stack, carry, rows, microbatch, chunk)

    stack, down = jax.vjp(run, on_stage.index(stage.stack, chunk), carry)[1](gradient)
    return _add(work, moving, None, stack, chunk), down


def _backward_last(work: _Work, moving: _Moving, given: _Given) -> tuple[_Moving, Tree]:
    """Run the last virtual stage forward and backward: through the loss and its layers."""
    stage, (microbatch, chunk, carry, _) = work.stage, given
    rows = on_stage.rows_of(stage, microbatch)

    def run(outer: Tree, stack: Tree, carry: Tree) -> tuple[jax.Array, TaskSums]:
        carry = on_stage.layers(stage, stack, carry, rows, microbatch, chunk)
        sums = on_stage.loss(stage, outer, carry, rows)
        return sums[0] * (work.scale / work.constant), sums

    differentiate = jax.grad(run, argnums=(0, 1, 2), has_aux=True)
    (outer, stack, down), sums = differentiate(stage.outer, on_stage.index(stage.stack, chunk), carry)
    moving = dataclasses.replace(moving, sums=jax.tree.map(jnp.add, moving.sums, sums))
    return _add(work, moving, outer, stack, chunk), down


def _add(work: _Work, moving: _Moving, outer: Tree | None, stack: Tree, chunk: jax.Array) -> _Moving:
    """Add one microbatch's gradients to the sums: outside the stack (None: the stage uses none) and of one chunk."""
    name = work.stage.pipeline.stack
    if outer is None:
        outer = moving.outer
    else:
        outer = _kept(work, constrain_parameters(cast_floats(outer, jnp.float32)))
        outer = jax.tree.map(jnp.add, moving.outer, outer)
    summed = jax.tree.map(
        lambda total, g: jax.lax.dynamic_update_index_in_dim(total, total[chunk] + g, chunk, 0),
        moving.stack,
        _kept(work, {name: cast_floats(stack, jnp.float32)})[name],
    )
    return dataclasses.replace(moving, outer=outer, stack=summed)


def _kept(work: _Work, gradients: Tree) -> Tree:
    """Return what this device sums of one microbatch's gradients: under ZeRO-2 they are reduced over `data` first."""
    if not work.reduction.each_microbatch:
        return gradients
    return work.reduction.reduce(gradients, {name: work.shapes[name] for name in gradients})


def _send(work: _Work, moving: _Moving, up: Tree, down: Tree) -> _Moving:
    """Send the carry up and the gradient down, on every stage in every tick."""
    return dataclasses.replace(moving, up=on_stage.send_up(work.stage, up), down=on_stage.send_down(work.stage, down))


# --- The forward half, for evaluation: what arrives in a tick is used in that tick, so nothing is stored. ---


def pipeline_sums(pipeline: Pipeline, code: StageCode, params: Tree, batch: Tree, key: jax.Array) -> TaskSums:
    """Sum the loss over a global batch, by the forward half of the pipeline's schedule.

    Args:
        pipeline: schedule, layout and stack; every forward of the schedule reads what arrived in its own tick.
        code: what stages compute.
        params: in the compute dtype, those outside the stack replicated over `fsdp`.
        batch: arrays [B, ...]; B divides by the microbatches and the shards of the batch.
        key: random key.

    Returns:
        Loss sum and weight, float32 [], and the metric sums, the same on every device.
    """
    outer, stack = _without_stack(pipeline, params)
    everywhere = PartitionSpec()
    specs = (everywhere, PartitionSpec("pipe"), batch_specs(batch), everywhere)
    return on_stage.enter(pipeline, partial(_local_sums, pipeline, code), specs, everywhere)(outer, stack, batch, key)


def _local_sums(pipeline: Pipeline, code: StageCode, outer: Tree, stack: Tree, batch: Tree, key: jax.Array) -> TaskSums:
    """Run every tick on one device, then sum over stages and shards."""
    tables = pipeline.schedule.tables()
    used = (tables.forward_microbatch >= 0).any(axis=1)
    ticks = jnp.asarray(tables.forward_microbatch[used]), jnp.asarray(tables.forward_chunk[used])
    nothing = [jax.tree.map(lambda _: None, tree) for tree in (outer, stack)]
    stage = on_stage.make_stage(pipeline, code, (outer, nothing[0], stack, nothing[1], batch, key))
    no_carry = on_stage.empty_carry(stage)
    no_sums = on_stage.empty_sums(stage, no_carry)

    def last(microbatch: jax.Array, chunk: jax.Array, carry: Tree) -> tuple[Tree, TaskSums]:
        rows = on_stage.rows_of(stage, microbatch)
        carry = on_stage.layers(stage, on_stage.index(stage.stack, chunk), carry, rows, microbatch, chunk)
        return no_carry, on_stage.loss(stage, stage.outer, carry, rows)

    def tick(moving: tuple[Tree, TaskSums], row: tuple[jax.Array, jax.Array]) -> tuple[tuple[Tree, TaskSums], None]:
        arrived, sums = moving
        microbatch, chunk = row[0][stage.number], jnp.maximum(row[1][stage.number], 0)
        branches = (
            lambda *args: (no_carry, no_sums),
            lambda *args: (on_stage.forward(stage, *args), no_sums),
            last,
        )
        kind = jnp.where(microbatch < 0, 0, jnp.where(on_stage.is_last(stage, chunk), 2, 1))
        up, found = jax.lax.switch(kind, branches, microbatch, chunk, arrived)
        return (on_stage.send_up(stage, up), jax.tree.map(jnp.add, sums, found)), None

    (_, sums), _ = jax.lax.scan(tick, (no_carry, no_sums), ticks)
    return jax.lax.psum(sums, ("pipe", "data"))
