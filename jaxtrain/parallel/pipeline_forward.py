"""The forward half of a pipeline, for evaluation: what arrives in a tick is used in that tick, so nothing is stored."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.models.tasks import Sums
from jaxtrain.parallel.gradients import batch_specs
from jaxtrain.parallel.stage import Pipeline, Stage, StageCode, Tree, enter, index


def pipeline_sums(
    pipeline: Pipeline, code: StageCode, params: Tree, batch: Tree, key: jax.Array
) -> tuple[jax.Array, jax.Array, Sums]:
    """Loss sum, weight and metric sums over a global batch, by the forward half of the pipeline's schedule.

    Args:
        pipeline: schedule, layout and stack; every forward of the schedule reads what arrived in its own tick.
        code: what stages compute.
        params: in the compute dtype, those outside the stack whole over `fsdp`.
        batch: leaves [B, ...]; B divides by the microbatches and the shards of the batch.
        key: folded with the microbatch's index.
    """
    stack_name, tables = pipeline.stack, pipeline.schedule.tables()
    used = (tables.forward_microbatch >= 0).any(axis=1)
    ticks = (jnp.asarray(tables.forward_microbatch[used]), jnp.asarray(tables.forward_chunk[used]))

    def local(outer: Tree, stack: Tree, batch: Tree, key: Any) -> Any:
        stage = Stage(pipeline, code, lambda params, _: params, (outer, None, stack, None, batch, key))

        def last(microbatch: jax.Array, chunk: jax.Array, carry: Tree) -> Any:
            rows = stage.rows(microbatch)
            carry = stage.layers(index(stage.stack, chunk), carry, rows, microbatch, chunk)
            return stage.no_carry, stage.loss(stage.outer, carry, rows)

        def tick(moving: tuple[Tree, Any], row: tuple[jax.Array, jax.Array]) -> tuple[tuple[Tree, Any], None]:
            arrived, sums = moving
            microbatch, chunk = row[0][stage.number], jnp.maximum(row[1][stage.number], 0)
            branches = (
                lambda *args: (stage.no_carry, stage.no_sums),
                lambda *args: (stage.forward(*args), stage.no_sums),
                last,
            )
            kind = jnp.where(microbatch < 0, 0, jnp.where(stage.is_last(chunk), 2, 1))
            up, new = jax.lax.switch(kind, branches, microbatch, chunk, arrived)
            return (jax.lax.ppermute(up, "pipe", stage.up), jax.tree.map(jnp.add, sums, new)), None

        (_, sums), _ = jax.lax.scan(tick, (stage.no_carry, stage.no_sums), ticks)
        return jax.lax.psum(sums, ("pipe", "data"))

    outer = {name: value for name, value in params.items() if name != stack_name}
    whole = PartitionSpec()
    run = enter(pipeline, local, (whole, PartitionSpec("pipe"), batch_specs(batch), whole), whole)
    return run(outer, params[stack_name], batch, key)
