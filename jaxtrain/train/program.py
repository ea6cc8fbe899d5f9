"""What a train step computes: pure functions of a state and a batch, without a device in sight.

`take_step` computes gradients and gives them to `update.py`. Parameters are gathered by `hold_parameters` (ZeRO, once
a step) and inside the model (`layout/gather.py`); the loss scale multiplies the loss in `_loss` and
`parallel/pipeline.py`, and divides the gradients in `update.py`; gradients are averaged at the end of
`compute_gradients` and `pipeline_gradients` in `parallel/`. Evaluation is `evaluation_sums`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.layout.gather import gather_parameters, hold_parameters
from jaxtrain.layout.keys import shard_key
from jaxtrain.layout.rules import FamilyTable
from jaxtrain.layout.sharding import use_layout
from jaxtrain.models.model import Model, ModelState, Params, Parts, PartsApply, key_for
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import Batch, ModelCall, Reference, Sums, Task, TaskSums, calling_sums, task_sums
from jaxtrain.models.tasks import weight_per_token
from jaxtrain.ops.loss.cross_entropy import compute_logits
from jaxtrain.parallel.gradients import Accumulation, Arguments, Gradients, compute_gradients
from jaxtrain.parallel.microbatches import loss_divisor
from jaxtrain.parallel.pipeline import pipeline_gradients, pipeline_sums
from jaxtrain.parallel.stage import Pipeline
from jaxtrain.precision.policy import Policy, cast_floats
from jaxtrain.runtime.tree import merge_leaves
from jaxtrain.train.state import StepProgram, TrainState
from jaxtrain.train.update import Metrics, update_state


def take_step(program: StepProgram, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """Take one optimizer step: return the state after it, and what it reports."""
    with program.sharded_model.context(required=True):
        gradients = _gradients(program, state, batch)
        with jax.named_scope("optimizer"):
            return update_state(program, state, gradients)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Fixed:
    """What the loss of a step reads besides the trained parameters and the model_state: `Arguments.fixed`.

    Attributes:
        params: the frozen parameters; all of them for a task that calls the model itself.
        scale: loss scale, float32 []; 1 where there is none.
        average, step, reference: of the state, for a task that calls the model itself.
    """

    params: Params
    scale: jax.Array
    average: tuple[Params, ModelState] | None = None
    step: jax.Array | None = None
    reference: Reference | None = None


def _fixed(program: StepProgram, state: TrainState) -> _Fixed:
    """Return what the loss reads of a state besides what is differentiated."""
    if not program.task.calls_model:
        return _Fixed(program.frozen(state.params), _scale(state))
    average = None
    if program.settings.has_average:
        average = (state.evaluation_params, state.evaluation_model_state)
    return _Fixed(state.params, _scale(state), average, state.step, state.reference)


def _scale(state: TrainState) -> jax.Array:
    return jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale


def _gradients(program: StepProgram, state: TrainState, batch: Batch) -> Gradients:
    """Return the gradients of the mean loss over the global batch, times the loss scale."""
    task = program.task
    model = program.sharded_model.model
    step_key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), 0)
    if model.has_experts and task.takes_deferred_logits:
        # Of the batch, and not of a microbatch: a router's tokens count alike in all of them.
        batch = {**batch, "weight_per_token": weight_per_token(batch)}
    if program.pipeline is not None:
        return _pipeline_gradients(program, program.pipeline, state, batch, step_key)
    zero = program.settings.zero
    layout = program.layout
    trained = program.trained(state.params)
    # A task that calls the model itself may read the parameters, which it gets as the state stores them.
    if zero > 0 and not task.calls_model:
        trained = hold_parameters(cast_floats(trained, program.sharded_model.policy.compute_dtype))
        layout = replace(layout, holds=True)
    on_shards = False
    stack = None
    if not task.calls_model:
        # Shipped models add up over the shards of data what they count; another model may mix rows.
        on_shards = task.rows == "separate" and isinstance(model.axes, FamilyTable)
        stack = _stack_run_once(model)
    plan = Accumulation(
        count=program.settings.accumulation_steps,
        layout=layout,
        zero=zero,
        on_shards=on_shards,
        stack=stack,
        powers_of_two=program.powers_of_two,
    )
    arguments = Arguments(
        params=trained,
        fixed=_fixed(program, state),
        model_state=state.model_state,
        batch=batch,
        key=step_key,
    )
    with use_layout(layout):
        return compute_gradients(_loss(program), arguments, plan)


def _stack_run_once(model: Model) -> str | None:
    """Return the path of the stack that `apply` of a model scans once, by `scan_stack`; None: it may do otherwise."""
    parts = model.parts
    if parts is None or not isinstance(model.apply, PartsApply) or model.adapted is not None:
        return None
    # Set by `from_stages`, whose layers are run by `scan_stack`.
    return parts.stack if parts.stack in model.gathers_itself else None


# --- The loss of a microbatch. ---


def _loss(program: StepProgram) -> Callable[..., tuple[jax.Array, Any]]:
    """Return the loss that is differentiated, as `parallel.gradients.LossFunction`."""

    def loss(
        trained: Params, fixed: _Fixed, model_state: ModelState, rows: Batch, key: jax.Array
    ) -> tuple[jax.Array, Any]:
        params = merge_leaves(trained, fixed.params)
        (loss_sum, weight, metrics), model_state = _microbatch_sums(program, fixed, params, model_state, rows, key)
        weight = jax.lax.stop_gradient(weight)
        scaled = loss_sum / loss_divisor(weight, powers_of_two=program.powers_of_two) * fixed.scale
        return scaled, (loss_sum, weight, model_state, metrics)

    return loss


def _microbatch_sums(
    program: StepProgram, fixed: _Fixed, params: Params, model_state: ModelState, rows: Batch, key: jax.Array
) -> tuple[TaskSums, ModelState]:
    """Return the sums of a microbatch in a step, and the model_state after it."""
    model = program.sharded_model
    task = program.task
    if not task.calls_model:
        apply = model.apply_deferred if task.takes_deferred_logits else model.apply
        outputs, model_state = apply(params, model_state, rows["inputs"], key=key, train=True)
        with jax.named_scope("loss"):
            return task_sums(task, outputs, rows, train=True), model_state
    assert fixed.step is not None
    loss_key, call_key = jax.random.split(key)
    call = ModelCall(
        apply_model=model.apply,
        params=params,
        model_state=model_state,
        train=True,
        step=fixed.step,
        key=call_key,
        _average=fixed.average,
        apply_deferred=model.apply_deferred,
        _reference=fixed.reference,
    )
    with jax.named_scope("loss"):
        return calling_sums(task, call, rows, shard_key(loss_key))


# --- On a pipeline. ---


@dataclass(frozen=True)
class _ModelStages:
    """A model's parts and a task as `StageCode`."""

    parts: Parts
    task: Task
    policy: Policy
    train: bool

    def embed(self, outer: Any, rows: Batch, key: jax.Array) -> Any:
        parts_key = key_for(self.parts.embed, key) if self.train else None
        return self.parts.embed(outer, self._inputs(rows), key=parts_key, train=self.train)

    def layers(self, stack: Any, carry: Any, rows: Batch, first_layer: jax.Array, key: jax.Array) -> Any:
        parts_key = key_for(self.parts.layers, key) if self.train else None
        return self.parts.layers(
            stack, carry, self._inputs(rows), first_layer=first_layer, key=parts_key, train=self.train
        )

    def loss(self, outer: Any, carry: Any, rows: Batch) -> tuple[jax.Array, jax.Array, Sums]:
        outputs = self.parts.head(outer, carry, train=self.train)
        if not self.task.takes_deferred_logits:
            outputs = compute_logits(outputs)
        with jax.named_scope("loss"):
            loss_sum, weight, metrics = task_sums(self.task, outputs, rows, train=self.train)
        return loss_sum, jax.lax.stop_gradient(weight), jax.lax.stop_gradient(metrics)

    def _inputs(self, rows: Batch) -> Any:
        return cast_floats(rows["inputs"], self.policy.compute_dtype)


def _stages(
    pipeline: Pipeline, model: ShardedModel, task: Task, params: Params, *, train: bool
) -> tuple[_ModelStages, Params]:
    """Return what the stages compute, and parameters in the compute dtype; layers gather their own over `fsdp`."""
    assert model.model.parts is not None
    held = hold_parameters(cast_floats(params, model.policy.compute_dtype))
    stages = _ModelStages(model.model.parts, task, model.policy, train)
    return stages, gather_parameters(held, skip=(pipeline.stack,))


def _pipeline_gradients(
    program: StepProgram, pipeline: Pipeline, state: TrainState, batch: Batch, key: jax.Array
) -> Gradients:
    stages, params = _stages(pipeline, program.sharded_model, program.task, state.params, train=True)
    trained = program.trained(params)
    fixed = program.frozen(params)
    return pipeline_gradients(
        pipeline,
        stages,
        trained,
        fixed,
        dict(batch),
        key,
        _scale(state),
        powers_of_two=program.powers_of_two,
    )


def evaluation_sums(
    pipeline: Pipeline, sharded_model: ShardedModel, task: Task, params: Params, batch: Batch
) -> TaskSums:
    """Return the sums of a batch on a pipeline, without dropout: loss, weight and metrics.

    `params` are those that are stored.
    """
    stages, compute_params = _stages(pipeline, sharded_model, task, params, train=False)
    return pipeline_sums(pipeline, stages, compute_params, dict(batch), jax.random.key(0))
