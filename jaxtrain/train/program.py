"""What a train step computes: pure functions of a state and a batch, without a device in sight."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.errors import ConfigError
from jaxtrain.layout.gather import hold_parameters
from jaxtrain.layout.rules import FamilyTable
from jaxtrain.layout.sharding import use_layout
from jaxtrain.models.model import Model, ModelState, Params, PartsApply
from jaxtrain.models.sharded import ShardedModel, stored_params
from jaxtrain.models.task import Batch, ModelCall, Task, TaskSums, calling_sums, task_sums
from jaxtrain.optim.offload import to_host
from jaxtrain.parallel.global_rows import TwoPasses, global_row_gradients
from jaxtrain.parallel.gradients import compute_gradients, compute_mean_loss
from jaxtrain.parallel.microbatches import loss_divisor
from jaxtrain.parallel.stage import Pipeline
from jaxtrain.precision.policy import LossScale, cast_floats
from jaxtrain.train.pipelined import step_gradients
from jaxtrain.train.spikes import first_history
from jaxtrain.train.state import (
    SkippedSteps,
    TrainState,
    floating_leaves,
    frozen_leaves,
    merge_leaves,
    select_leaves,
)
from jaxtrain.train.update import MeanGradients, Metrics, StepSettings, mean_gradients, update_state


@dataclass(frozen=True, eq=False)
class StepProgram:
    """What a train step is made of.

    Attributes:
        sharded_model: the model, its layout and its number formats.
        task: what outputs are compared with.
        optimizer: the transformation that updates the trained parameters.
        settings: clipping, averages, accumulation and the like.
        pipeline: schedule of the stages; None: the mesh has one.
    """

    sharded_model: ShardedModel
    task: Task
    optimizer: optax.GradientTransformation
    settings: StepSettings
    pipeline: Pipeline | None


def create_state(
    program: StepProgram, key: jax.Array, *, params: Params | None = None, model_state: ModelState | None = None
) -> TrainState:
    """The state at step 0.

    Args:
        program: of the step.
        key: typed key; parameters and the random numbers of every step derive from it.
        params: parameters to start from; None, also in place of single ones: those that the model draws.
        model_state: batch statistics and the like to start from, in the same form.
    """
    settings, policy = program.settings, program.sharded_model.policy
    init_key, run_key = jax.random.split(key)
    drawn = program.sharded_model.init(init_key)
    start: Params = drawn[0] if params is None else merge_leaves(params, drawn[0])
    start_state: ModelState = drawn[1] if model_state is None else merge_leaves(model_state, drawn[1])
    averaged = settings.ema_decay is not None
    ema = cast_floats(select_leaves(start, settings.trainable), jnp.float32) if averaged else None
    stored = stored_params(program.sharded_model.model, start, policy, settings.trainable)
    optimizer_state = first_optimizer_state(program, stored)
    return TrainState(
        step=jnp.int32(0),
        params=stored,
        optimizer_state=to_host(optimizer_state) if settings.offload_optimizer else optimizer_state,
        model_state=start_state,
        loss_scale=LossScale.create(settings.loss_scaling) if policy.loss_scaled else None,
        key=run_key,
        skipped=SkippedSteps(jnp.int32(0), jnp.int32(0)),
        ema=ema,
        ema_model_state=floating_leaves(start_state) if averaged else None,
        spikes=None if settings.spikes is None else first_history(settings.spikes),
    )


def first_optimizer_state(program: StepProgram, params: Params) -> optax.OptState:
    """The optimizer's state at step 0, of the parameters that are trained."""
    # In float32 under every policy: gradients come in float32, and a second moment in bf16 would stand still.
    trained = select_leaves(params, program.settings.trainable)
    return program.optimizer.init(cast_floats(trained, jnp.float32))


def take_step(program: StepProgram, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One optimizer step: the state after it, and what it reports."""
    with program.sharded_model.context(required=True):
        trained, scale = _trained(program, state), _scale(state)
        gradients = _gradients(program, state, trained, batch, scale)
        with jax.named_scope("optimizer"):
            return update_state(
                state,
                trained,
                gradients,
                scale,
                lambda trained: _mean_loss(program, state, trained, batch),
                optimizer=program.optimizer,
                layout=program.sharded_model.layout,
                settings=program.settings,
            )


def find_gradients(program: StepProgram, state: TrainState, batch: Batch) -> MeanGradients:
    """Mean gradients of a batch at the state's parameters, as the optimizer of a step would get them, unclipped."""
    with program.sharded_model.context(required=True):
        scale = _scale(state)
        return mean_gradients(_gradients(program, state, _trained(program, state), batch, scale), scale)


def _trained(program: StepProgram, state: TrainState) -> Params:
    return select_leaves(state.params, program.settings.trainable)


def _scale(state: TrainState) -> jax.Array:
    return jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Fixed:
    """What the loss of a step reads besides the trained parameters and the model_state.

    Attributes:
        params: the frozen parameters, None in place of those that are trained; all of them for a task that calls the
            model itself.
        average: moving averages of the parameters and of the model_state; None: the task does not read them.
        step: int32 [], steps done; None: the task does not read it.
    """

    params: Params
    average: tuple[Params, ModelState] | None
    step: jax.Array | None


def _fixed_of(program: StepProgram, state: TrainState) -> _Fixed:
    if not program.task.calls_model:
        return _Fixed(frozen_leaves(state.params, program.settings.trainable), None, None)
    averaged = program.settings.ema_decay is not None
    average = (state.evaluation_params, state.evaluation_model_state) if averaged else None
    return _Fixed(state.params, average, state.step)


def _sums_of(
    program: StepProgram, fixed: _Fixed, params: Params, model_state: ModelState, rows: Batch, key: jax.Array
) -> tuple[TaskSums, ModelState]:
    """The sums of a microbatch in a step, and the model_state after it."""
    sharded_model, task = program.sharded_model, program.task
    if task.calls_model:
        assert fixed.step is not None
        loss_key, call_key = jax.random.split(key)
        call = ModelCall(
            sharded_model.apply,
            params,
            model_state,
            True,
            fixed.step,
            call_key,
            fixed.average,
            sharded_model.apply_deferred,
        )
        with jax.named_scope("loss"):
            return calling_sums(task, call, rows, loss_key)
    apply = sharded_model.apply_deferred if task.takes_deferred_logits else sharded_model.apply
    outputs, model_state = apply(params, model_state, rows["inputs"], key=key, train=True)
    with jax.named_scope("loss"):
        return task_sums(task, outputs, rows, train=True), model_state


def _mean_loss(program: StepProgram, state: TrainState, trained: Params, batch: Batch) -> jax.Array:
    """The loss of a step at other trained parameters (float32), with the random numbers of the step: float32 [].

    Raises:
        ConfigError: on a pipeline, with a loss scale, or with microbatches of a task over all rows.
    """
    all_rows = program.task.rows == "global" and program.settings.accumulation_steps > 1
    if program.pipeline is not None or state.loss_scale is not None or all_rows:
        raise ConfigError(
            "the optimizer computes the loss again (a line search, Sophia, SAM), which takes parallel.pipe=1, another "
            "policy than fp16, and accumulation_steps=1 where rows='global'"
        )
    # The loss of the parameters as they would be stored.
    stored = jax.tree.map(lambda new, old: new.astype(old.dtype), trained, _trained(program, state))
    return _gradients(program, state, stored, batch, jnp.float32(1), compute=compute_mean_loss)


def _gradients(
    program: StepProgram,
    state: TrainState,
    trained: Params,
    batch: Batch,
    scale: jax.Array,
    compute: Any = compute_gradients,
) -> Any:
    """Gradients of the mean loss over the global batch, times the loss scale (float32 []); or what `compute` gives."""
    sharded_model, task, settings = program.sharded_model, program.task, program.settings
    powers_of_two = sharded_model.policy.linear_format is not None

    def loss(
        trained: Params, fixed: tuple[_Fixed, jax.Array], model_state: ModelState, rows: Batch, key: jax.Array
    ) -> tuple[jax.Array, Any]:
        read, scale = fixed
        params = merge_leaves(trained, read.params)
        (loss_sum, weight, metrics), model_state = _sums_of(program, read, params, model_state, rows, key)
        weight = jax.lax.stop_gradient(weight)
        return loss_sum / loss_divisor(weight, powers_of_two=powers_of_two) * scale, (
            loss_sum,
            weight,
            model_state,
            metrics,
        )

    step_key = jax.random.fold_in(state.key, state.step)
    if program.pipeline is not None:
        return step_gradients(
            program.pipeline,
            sharded_model,
            task,
            trained,
            state.params,
            batch,
            step_key,
            scale=scale,
            zero=settings.zero,
        )
    count, layout, zero = settings.accumulation_steps, sharded_model.layout, settings.zero
    # A task that calls the model itself may read the parameters, which it gets as the state stores them.
    if zero > 0 and not task.calls_model:
        trained = hold_parameters(cast_floats(trained, sharded_model.policy.compute_dtype))
        layout = replace(layout, holds=True)
    arguments = (trained, (_fixed_of(program, state), scale), state.model_state, batch, step_key)
    with use_layout(layout):
        if task.rows == "global" and count > 1:
            passes = _two_passes(program, powers_of_two=powers_of_two)
            return global_row_gradients(
                passes, *arguments, count=count, layout=layout, zero=zero, powers_of_two=powers_of_two
            )
        # A shard of data holds some rows of a microbatch only. Models of ours add up over the shards what they count;
        # of another one nobody knows whether it mixes rows.
        is_ours = isinstance(sharded_model.model.axes, FamilyTable)
        on_shards = is_ours and task.rows == "separate" and not task.calls_model
        stack = None if task.calls_model else _stack_run_once(sharded_model.model)
        return compute(
            loss,
            *arguments,
            accumulation_steps=count,
            layout=layout,
            zero=zero,
            on_shards=on_shards,
            stack=stack,
            powers_of_two=powers_of_two,
        )


def _stack_run_once(model: Model) -> str | None:
    """Path of the stack that `apply` of a model scans once, by `scan_stack`; None where it may do something else."""
    parts = model.parts
    if parts is None or not isinstance(model.apply, PartsApply) or model.adapted is not None:
        return None
    # Set by `from_stages`, whose layers are run by `scan_stack`.
    return parts.stack if parts.stack in model.gathers_itself else None


def _two_passes(program: StepProgram, *, powers_of_two: bool) -> TwoPasses:
    """The outputs of a microbatch and the loss of all rows, for a task whose rows depend on one another."""
    sharded_model, task = program.sharded_model, program.task

    def outputs(
        trained: Params, fixed: tuple[_Fixed, jax.Array], model_state: ModelState, inputs: Any, key: jax.Array
    ) -> tuple[Any, ModelState]:
        params = merge_leaves(trained, fixed[0].params)
        return sharded_model.apply(params, model_state, inputs, key=key, train=True)

    def loss(outputs: Any, fixed: tuple[_Fixed, jax.Array], batch: Batch) -> tuple[jax.Array, TaskSums]:
        with jax.named_scope("loss"):
            total, weight, metrics = task_sums(task, outputs, batch, train=True)
        weight = jax.lax.stop_gradient(weight)
        return total / loss_divisor(weight, powers_of_two=powers_of_two) * fixed[1], (total, weight, metrics)

    return TwoPasses(outputs, loss)
