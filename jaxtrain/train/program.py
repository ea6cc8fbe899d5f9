"""What a train step computes: pure functions of a state and a batch, without a device in sight."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.errors import ConfigError
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel, stored_params
from jaxtrain.models.tasks import Batch, Task, divisor, task_sums
from jaxtrain.optim.offload import to_host
from jaxtrain.parallel.gradients import compute_gradients
from jaxtrain.parallel.mean_loss import compute_mean_loss
from jaxtrain.parallel.stage import Pipeline
from jaxtrain.precision.policy import LossScale, cast_floats
from jaxtrain.train.model_checks import check_compute_dtype
from jaxtrain.train.parallelism import microbatches
from jaxtrain.train.pipelined import step_gradients
from jaxtrain.train.state import SkippedSteps, TrainState, floating_leaves, merge_leaves, select_leaves
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
    params = drawn[0] if params is None else merge_leaves(params, drawn[0])
    model_state = drawn[1] if model_state is None else merge_leaves(model_state, drawn[1])
    averaged = settings.ema_decay is not None
    ema = cast_floats(select_leaves(params, settings.trainable), jnp.float32) if averaged else None
    params = stored_params(params, policy, settings.trainable)
    optimizer_state = first_optimizer_state(program, params)
    return TrainState(
        step=jnp.int32(0),
        params=params,
        optimizer_state=to_host(optimizer_state) if settings.offload_optimizer else optimizer_state,
        model_state=model_state,
        loss_scale=LossScale.create(settings.loss_scaling) if policy.loss_scaled else None,
        key=run_key,
        skipped=SkippedSteps(jnp.int32(0), jnp.int32(0)),
        ema=ema,
        ema_model_state=floating_leaves(model_state) if averaged else None,
    )


def first_optimizer_state(program: StepProgram, params: Params) -> optax.OptState:
    """The optimizer's state at step 0, of the parameters that are trained."""
    # In float32 under every policy: gradients come in float32, and a second moment in bf16 would stand still.
    trained = select_leaves(params, program.settings.trainable)
    return program.optimizer.init(cast_floats(trained, jnp.float32))


def take_step(program: StepProgram, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One optimizer step: the state after it, and what it reports.

    Raises:
        ConfigError: the policy changes no matmul of the model, or something else that shows in tracing.
    """
    sharded_model, settings = program.sharded_model, program.settings
    with sharded_model.context(required=True):
        count = sum(microbatches(program.pipeline, settings.accumulation_steps).values())
        check_compute_dtype(sharded_model, state, batch["inputs"], count)
        trained = select_leaves(state.params, settings.trainable)
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        gradients = _gradients(program, state, trained, batch, scale)
        with jax.named_scope("optimizer"):
            return update_state(
                state,
                trained,
                gradients,
                scale,
                lambda trained: _mean_loss(program, state, trained, batch),
                optimizer=program.optimizer,
                layout=sharded_model.layout,
                settings=settings,
            )


def find_gradients(program: StepProgram, state: TrainState, batch: Batch) -> MeanGradients:
    """Mean gradients of a batch at the state's parameters, as the optimizer of a step would get them, unclipped.

    Raises:
        ConfigError: as `take_step`.
    """
    sharded_model, settings = program.sharded_model, program.settings
    with sharded_model.context(required=True):
        count = sum(microbatches(program.pipeline, settings.accumulation_steps).values())
        check_compute_dtype(sharded_model, state, batch["inputs"], count)
        trained = select_leaves(state.params, settings.trainable)
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        return mean_gradients(_gradients(program, state, trained, batch, scale), scale)


def _mean_loss(program: StepProgram, state: TrainState, trained: Params, batch: Batch) -> jax.Array:
    """The loss of a step at other trained parameters (float32), with the random numbers of the step: float32 [].

    Raises:
        ConfigError: on a pipeline, or with a loss scale.
    """
    calls = "the optimizer computes the loss again (value_fn, obj_fn, grad_fn: a line search, Sophia, SAM)"
    if program.pipeline is not None:
        raise ConfigError(f"{calls}, which a pipeline cannot; use parallel.pipe=1 with fsdp or tensor, or optax.adamw")
    if state.loss_scale is not None:
        raise ConfigError(f"{calls}, whose gradients a loss scale does not reach; use the policy bf16 or fp32")
    # The loss of the parameters as they would be stored.
    stored = jax.tree.map(
        lambda new, old: new.astype(old.dtype), trained, select_leaves(state.params, program.settings.trainable)
    )
    return _gradients(program, state, stored, batch, jnp.float32(1), compute=compute_mean_loss)


def _gradients(
    program: StepProgram,
    state: TrainState,
    trained: Params,
    batch: Batch,
    scale: jax.Array,
    compute: Callable[..., Any] = compute_gradients,
) -> Any:
    """Gradients of the mean loss over the global batch, times the loss scale (float32 []); or what `compute` gives."""
    sharded_model, task, settings = program.sharded_model, program.task, program.settings
    apply = sharded_model.apply_deferred if task.takes_deferred_logits else sharded_model.apply

    def loss(
        trained: Params, fixed: tuple[Params, jax.Array], model_state: ModelState, rows: Batch, key: jax.Array
    ) -> tuple[jax.Array, Any]:
        frozen, scale = fixed
        params = merge_leaves(trained, frozen)
        outputs, model_state = apply(params, model_state, rows["inputs"], key=key, train=True)
        with jax.named_scope("loss"):
            loss_sum, weight, metrics = task_sums(task, outputs, rows, train=True)
        weight = jax.lax.stop_gradient(weight)
        return loss_sum / divisor(weight) * scale, (loss_sum, weight, model_state, metrics)

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
    return compute(
        loss,
        trained,
        (state.params, scale),
        state.model_state,
        batch,
        step_key,
        accumulation_steps=settings.accumulation_steps,
        layout=sharded_model.layout,
        zero=settings.zero,
    )
