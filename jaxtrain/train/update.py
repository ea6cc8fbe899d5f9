"""From gradients to the next state: clipping, the optimizer, the moving average, the guard against bad steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.layout.sharding import Layout
from jaxtrain.layout.zero import stage_over_data
from jaxtrain.models.task import Sums, divisor
from jaxtrain.models.tasks import MACRO
from jaxtrain.optim.offload import update_on_host
from jaxtrain.optim.rate import injected, rate_in
from jaxtrain.parallel.gradients import Gradients, constrain_gradients
from jaxtrain.precision.policy import LossScaling, cast_floats
from jaxtrain.train.gradient_norm import gradient_norm
from jaxtrain.train.optimizer_arguments import MeanLoss, extra_arguments, update_optimizer
from jaxtrain.train.parallelism import Parallelism
from jaxtrain.train.spikes import SpikeRule
from jaxtrain.train.state import TrainState, floating_leaves, merge_leaves

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class StepSettings:
    """What a step does besides model, task and optimizer; see `make_train_step` for each."""

    accumulation_steps: int
    clip_norm: float | None
    ema_decay: float | None
    trainable: Callable[[str], bool] | None
    learning_rate: optax.Schedule | None
    loss_scaling: LossScaling
    parallelism: Parallelism
    offload_optimizer: bool = False
    spikes: SpikeRule | None = None
    sliced_norm: bool = False

    @property
    def zero(self) -> int:
        """The ZeRO stage over `data`; stage 3 is the `fsdp` axis."""
        return stage_over_data(self.parallelism.zero)


def update_state(
    state: TrainState,
    trained: Any,
    gradients: Gradients,
    scale: jax.Array,
    mean_loss: MeanLoss,
    *,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    settings: StepSettings,
) -> tuple[TrainState, Metrics]:
    """The state after a step, and what the step reports.

    Args:
        state: before the step.
        trained: its parameters with None where one is frozen.
        gradients: of those, times the loss scale.
        scale: float32 [], the loss scale.
        mean_loss: trained parameters -> the loss of this batch, for optimizers that compute it again.
        optimizer: gradients -> updates.
        layout: of the step.
        settings: clipping, averages, loss scaling.
    """
    scaled = state.loss_scale is not None

    def unscaled(tree: Any, scale: jax.Array) -> Any:
        return _unscaled(tree, scale if scaled else None)

    tree = constrain_gradients(gradients.tree, layout, settings.zero)
    grad_norm = gradient_norm(unscaled(tree, scale), sliced=settings.sliced_norm)
    loss = gradients.loss_sum / divisor(gradients.weight)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    # A batch without any weight says nothing: momentum and decay would move parameters by it, and its sum of 0 would be
    # the best loss ever to an optimizer that reads one. Weights of both signs may sum to 0 too, and say something.
    has_weight = gradients.weight != 0
    weighs = has_weight | (gradients.loss_sum != 0) | (grad_norm != 0)
    accepted = finite & weighs
    history, seen, spiked = state.spikes, {}, None
    if settings.spikes is not None and history is not None:
        # A loss that is not divided by a weight cannot be compared with others.
        spiked = accepted & has_weight & history.spiked(loss, grad_norm, settings.spikes)
        accepted = accepted & ~spiked
        history = history.after(loss, grad_norm, accepted=accepted & has_weight, spiked=spiked)
        seen = {"spiked": spiked.astype(jnp.int32), "spikes": history.spikes}
    clip = None
    if settings.clip_norm is not None:
        clip = settings.clip_norm / jnp.maximum(grad_norm, settings.clip_norm)

    def keep(new: Any, old: Any, accepted: jax.Array) -> Any:
        # A select, not a product with zero: NaN times zero is NaN. The dtype of the state never changes, whatever
        # an optimizer makes of it.
        return jax.tree.map(lambda n, o: jnp.where(accepted, n.astype(o.dtype), o), new, old)

    def advance(gradients: Any, optimizer_state: Any, trained: Any, scalars: Any) -> tuple[Any, Any]:
        accepted, scale, clip, loss = scalars
        updates = grad = unscaled(gradients, scale)
        if clip is not None:
            updates = jax.tree.map(lambda g: g * clip, updates)
        # In float32 as everything the optimizer reads: weight decay of bf16 parameters is rounded with the rest of the
        # update, not before.
        read = cast_floats(trained, jnp.float32)
        extra = extra_arguments(loss, grad, mean_loss)
        updates, moved = update_optimizer(optimizer, updates, optimizer_state, read, extra)
        moved = keep(moved, optimizer_state, accepted)
        return keep(optax.apply_updates(trained, updates), trained, accepted), moved

    before = (tree, state.optimizer_state, trained, (accepted, scale, clip, loss))
    if settings.offload_optimizer:
        trained, optimizer_state = update_on_host(
            advance, *before, optimizer=optimizer, layout=layout, also=layout.state_axes
        )
    else:
        trained, optimizer_state = advance(*before)
    averages = (state.ema, state.ema_model_state)
    if settings.ema_decay is not None:
        decay = average_decay(settings.ema_decay, state.step - state.skipped.total)
        values = (trained, floating_leaves(gradients.model_state))
        averages = jax.tree.map(lambda e, x: decay * e + (1 - decay) * x.astype(e.dtype), averages, values)
    ema, ema_model_state = keep(averages, (state.ema, state.ema_model_state), accepted)

    # While a loss scale still falls, a skip is its search and no sign of divergence.
    settled = state.loss_scale is None or state.loss_scale.scale <= settings.loss_scaling.minimum
    is_bad = settled if spiked is None else settled | spiked
    skipped = state.skipped.count(accepted, settled=is_bad & (weighs | ~finite))
    loss_scale = state.loss_scale
    if loss_scale is not None:
        # Gradients that are 0 for want of a weight are no sign that the scale could grow.
        loss_scale = keep(loss_scale.move(finite, settings.loss_scaling), loss_scale, weighs | ~finite)
    new_state = TrainState(
        step=state.step + 1,
        params=merge_leaves(trained, state.params),
        optimizer_state=optimizer_state,
        model_state=keep(gradients.model_state, state.model_state, accepted),
        loss_scale=loss_scale,
        key=state.key,
        skipped=skipped,
        ema=ema,
        ema_model_state=ema_model_state,
        spikes=history,
    )
    metrics = {
        # Of a batch without any weight there is no mean.
        "loss": jnp.where(gradients.weight != 0, loss, jnp.nan),
        "grad_norm": grad_norm,
        "weight": gradients.weight,
        "skipped_steps": skipped.total,
        "skipped_in_a_row": skipped.in_a_row,
        **seen,
        **mean_metrics(gradients.metrics),
    }
    # Skipped steps do not advance the optimizer, so they do not advance its schedule either.
    shown = settings.learning_rate
    if shown is injected:
        rate = None if settings.offload_optimizer else rate_in(optimizer_state)
    else:
        rate = None if shown is None else shown(state.step - state.skipped.total)
    if rate is not None:
        metrics["learning_rate"] = jnp.asarray(rate, jnp.float32)
    if state.loss_scale is not None:
        metrics["loss_scale"] = state.loss_scale.scale
    return new_state, metrics


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeanGradients:
    """What `TrainStep.gradients` returns.

    Attributes:
        tree: like the trained parameters and sharded as they are, None in place of frozen ones; float32, without the
            loss scale and before clipping.
        loss: float32 [], the mean over the global batch, NaN where its weight is 0.
        weight: float32 [], the weight of the batch.
        metrics: of the task, name -> mean.
    """

    tree: Any
    loss: jax.Array
    weight: jax.Array
    metrics: Metrics


def mean_gradients(gradients: Gradients, scale: jax.Array) -> MeanGradients:
    """Gradients and sums of a batch as means.

    Args:
        gradients: times the loss scale.
        scale: float32 [], the loss scale.
    """
    loss = jnp.where(gradients.weight != 0, gradients.loss_sum / divisor(gradients.weight), jnp.nan)
    return MeanGradients(_unscaled(gradients.tree, scale), loss, gradients.weight, mean_metrics(gradients.metrics))


def _unscaled(tree: Any, scale: jax.Array | None) -> Any:
    """Gradients in float32, divided by the loss scale where there is one."""
    tree = cast_floats(tree, jnp.float32)
    return tree if scale is None else jax.tree.map(lambda g: g / scale, tree)


def average_decay(decay: float, updates: jax.Array) -> jax.Array:
    """What a moving average keeps of itself after so many updates: (1 + t) / (10 + t), at most `decay`.

    The first parameters are random numbers, of which a constant 0.999 would keep three quarters for 300 steps. With
    this the average always covers about the last tenth of the updates until `decay` is reached.

    Args:
        decay: the setting.
        updates: int32 [], finite steps before this one.

    Returns:
        float32 [].

    Source: `tf.train.ExponentialMovingAverage` with `num_updates`, as in Tan and Le 2019 (EfficientNet).
    """
    t = updates.astype(jnp.float32)
    return jnp.minimum(decay, (1 + t) / (10 + t))


def mean_metrics(sums: Sums) -> Metrics:
    """name -> sum / weight, NaN where the weight is 0; totals, which have no weight, as they are."""

    def mean(total: jax.Array, weight: jax.Array | None) -> jax.Array:
        return total if weight is None else jnp.where(weight != 0, total / divisor(weight), jnp.nan)

    means = {name: mean(total, weight) for name, (total, weight) in sums.items()}
    return {name: jnp.nanmean(one) if name.startswith(MACRO) else one for name, one in means.items()}
