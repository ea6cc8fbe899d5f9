"""The train step's model on a pipeline: what the stages compute, and in which dtype."""

from dataclasses import dataclass
from typing import Any

import jax

from jaxtrain.layout.gather import gather_parameters, hold_parameters
from jaxtrain.models.model import Params, Parts, key_for
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import Batch, Sums, Task, task_sums
from jaxtrain.ops.loss.cross_entropy import compute_logits
from jaxtrain.parallel.gradients import Gradients
from jaxtrain.parallel.pipeline import pipeline_gradients, pipeline_sums
from jaxtrain.parallel.stage import Pipeline
from jaxtrain.precision.policy import Policy, cast_floats
from jaxtrain.train.state import merge_leaves


@dataclass(frozen=True)
class _ModelStages:
    """A model's parts and a task as `StageCode`."""

    parts: Parts
    task: Task
    policy: Policy
    train: bool

    def embed(self, outer: Any, rows: Batch, key: jax.Array) -> Any:
        inputs = cast_floats(rows["inputs"], self.policy.compute_dtype)
        key_or_none = key_for(self.parts.embed, key) if self.train else None
        return self.parts.embed(outer, inputs, key=key_or_none, train=self.train)

    def layers(self, stack: Any, carry: Any, rows: Batch, first_layer: jax.Array, key: jax.Array) -> Any:
        key_or_none = key_for(self.parts.layers, key) if self.train else None
        inputs = cast_floats(rows["inputs"], self.policy.compute_dtype)
        return self.parts.layers(stack, carry, inputs, first_layer=first_layer, key=key_or_none, train=self.train)

    def loss(self, outer: Any, carry: Any, rows: Batch) -> tuple[jax.Array, jax.Array, Sums]:
        outputs = self.parts.head(outer, carry, train=self.train)
        outputs = outputs if self.task.takes_deferred_logits else compute_logits(outputs)
        with jax.named_scope("loss"):
            loss_sum, weight, metrics = task_sums(self.task, outputs, rows, train=self.train)
        return loss_sum, jax.lax.stop_gradient(weight), jax.lax.stop_gradient(metrics)


def _ready(params: Params, pipeline: Pipeline, policy: Policy) -> Params:
    """Parameters held in the compute dtype, those outside the stack gathered over `fsdp`; layers gather their own."""
    held = hold_parameters(cast_floats(params, policy.compute_dtype))
    return gather_parameters(held, skip=(pipeline.stack,))


def step_gradients(
    pipeline: Pipeline,
    sharded_model: ShardedModel,
    task: Task,
    trained: Params,
    params: Params,
    batch: Batch,
    key: jax.Array,
    *,
    scale: jax.Array,
    zero: int,
) -> Gradients:
    """`pipeline_gradients` of a model and a task.

    Args:
        pipeline: schedule and stack.
        sharded_model: its parts are what the stages compute.
        task: gives the loss of a microbatch.
        trained: parameters with None where one is frozen.
        params: all of them, as stored.
        batch: leaves [B, ...].
        key: of the step.
        scale: float32 [], the loss scale.
        zero: the ZeRO stage over `data`.
    """
    parts, policy = sharded_model.model.parts, sharded_model.policy
    ready = _ready(params, pipeline, policy)
    chosen = jax.tree.map(lambda t, p: None if t is None else p, trained, ready, is_leaf=lambda leaf: leaf is None)
    fixed = jax.tree.map(lambda t, p: p if t is None else None, trained, ready, is_leaf=lambda leaf: leaf is None)
    assert parts is not None
    stages = _ModelStages(parts, task, policy, train=True)
    return pipeline_gradients(
        pipeline,
        stages,
        merge_leaves,
        chosen,
        fixed,
        dict(batch),
        key,
        scale=scale,
        zero=zero,
        powers_of_two=policy.linear_format is not None,
    )


def evaluation_sums(
    pipeline: Pipeline, sharded_model: ShardedModel, task: Task, params: Params, batch: Batch
) -> tuple[jax.Array, jax.Array, Sums]:
    """`pipeline_sums` of a model and a task, without dropout; arguments as in `step_gradients`."""
    parts, policy = sharded_model.model.parts, sharded_model.policy
    assert parts is not None
    stages = _ModelStages(parts, task, policy, train=False)
    return pipeline_sums(pipeline, stages, _ready(params, pipeline, policy), dict(batch), jax.random.key(0))
