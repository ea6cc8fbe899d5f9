"""The forward half of a pipeline, for evaluation: what arrives in a tick is used in that tick, so nothing is stored."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.models.task import TaskSums
from jaxtrain.parallel import stage as on_stage
from jaxtrain.parallel.microbatches import Tree, batch_specs
from jaxtrain.parallel.stage import Pipeline, Stage, StageCode


class _Tick(NamedTuple):
    """What each stage does in a tick: int32 [stages], -1 where it idles."""

    microbatch: jax.Array
    chunk: jax.Array


def pipeline_sums(pipeline: Pipeline, code: StageCode, params: Tree, batch: Tree, key: jax.Array) -> TaskSums:
    """Sum the loss over a global batch, by the forward half of the pipeline's schedule.

    Args:
        pipeline: schedule, layout and stack; every forward of the schedule reads what arrived in its own tick.
        code: what stages compute.
        params: in the compute dtype, those outside the stack replicated over `fsdp`.
        batch: arrays [B, ...]; B divides by the microbatches and the shards of the batch.
        key: folded with the microbatch's index.

    Returns:
        Loss sum and weight, float32 [], and the metric sums, the same on every device.
    """
    outer = {name: value for name, value in params.items() if name != pipeline.stack}
    everywhere = PartitionSpec()
    specs = (everywhere, PartitionSpec("pipe"), batch_specs(batch), everywhere)
    run = on_stage.enter(pipeline, partial(_local_sums, pipeline, code), specs, everywhere)
    return run(outer, params[pipeline.stack], batch, key)


def _local_sums(pipeline: Pipeline, code: StageCode, outer: Tree, stack: Tree, batch: Tree, key: jax.Array) -> TaskSums:
    """Run every tick on one device, then sum over stages and shards."""
    tables = pipeline.schedule.tables()
    used = (tables.forward_microbatch >= 0).any(axis=1)
    ticks = _Tick(jnp.asarray(tables.forward_microbatch[used]), jnp.asarray(tables.forward_chunk[used]))
    stage = on_stage.make_stage(pipeline, code, lambda params, _: params, (outer, None, stack, None, batch, key))
    no_carry = on_stage.empty_carry(stage)
    no_sums = on_stage.empty_sums(stage, no_carry)

    def tick(moving: tuple[Tree, TaskSums], row: _Tick) -> tuple[tuple[Tree, TaskSums], None]:
        arrived, sums = moving
        microbatch, chunk = row.microbatch[stage.number], jnp.maximum(row.chunk[stage.number], 0)
        branches = (
            lambda *args: (no_carry, no_sums),
            lambda *args: (on_stage.forward(stage, *args), no_sums),
            lambda *args: (no_carry, _last(stage, *args)),
        )
        kind = jnp.where(microbatch < 0, 0, jnp.where(on_stage.is_last(stage, chunk), 2, 1))
        up, found = jax.lax.switch(kind, branches, microbatch, chunk, arrived)
        return (on_stage.send_up(stage, up), jax.tree.map(jnp.add, sums, found)), None

    (_, sums), _ = jax.lax.scan(tick, (no_carry, no_sums), ticks)
    return jax.lax.psum(sums, ("pipe", "data"))


def _last(stage: Stage, microbatch: jax.Array, chunk: jax.Array, carry: Tree) -> TaskSums:
    """Apply the last layers and the loss."""
    rows = on_stage.rows_of(stage, microbatch)
    carry = on_stage.layers(stage, on_stage.index(stage.stack, chunk), carry, rows, microbatch, chunk)
    return on_stage.loss(stage, stage.outer, carry, rows)
