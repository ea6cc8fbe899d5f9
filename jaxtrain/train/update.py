"""From gradients to the next state: clipping, the optimizer, the moving average, the guard against non-finite steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.parallel.gradients import Gradients, constrain_gradients
from jaxtrain.precision import LossScaling, Policy
from jaxtrain.sharding import Layout
from jaxtrain.tasks import Sums
from jaxtrain.train.parallelism import Parallelism
from jaxtrain.train.state import TrainState, merge_leaves

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class StepSettings:
    """What a step does besides model, task and optimizer; see `make_train_step` for each."""

    policy: Policy
    accumulation_steps: int
    clip_norm: float | None
    ema_decay: float | None
    trainable: Callable[[str], bool] | None
    learning_rate: optax.Schedule | None
    loss_scaling: LossScaling
    parallelism: Parallelism

    @property
    def zero(self) -> int:
        """The ZeRO stage over `data`; stage 3 is the `fsdp` axis."""
        return self.parallelism.zero % 3


def update_state(
    state: TrainState,
    trained: Any,
    gradients: Gradients,
    scale: jax.Array,
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
        optimizer: gradients -> updates.
        layout: of the step.
        settings: clipping, averages, loss scaling.
    """
    unscaled = jax.tree.map(lambda g: g / scale, gradients.tree) if state.loss_scale is not None else gradients.tree
    grad_norm = optax.tree.norm(unscaled)
    loss = gradients.loss_sum / jnp.maximum(gradients.weight, 1e-9)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    if settings.clip_norm is not None:
        factor = settings.clip_norm / jnp.maximum(grad_norm, settings.clip_norm)
        unscaled = jax.tree.map(lambda g: g * factor, unscaled)
    unscaled, trained = (constrain_gradients(tree, layout, settings.zero) for tree in (unscaled, trained))
    updates, optimizer_state = optimizer.update(unscaled, state.optimizer_state, trained)
    trained = optax.apply_updates(trained, updates)
    params = merge_leaves(trained, state.params)
    ema = state.ema
    if settings.ema_decay is not None:
        decay = settings.ema_decay
        ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p.astype(jnp.float32), ema, trained)

    def keep(new: Any, old: Any) -> Any:
        # A select, not a product with zero: NaN times zero is NaN. The dtype of the state never changes, whatever
        # an optimizer makes of it.
        return jax.tree.map(lambda n, o: jnp.where(finite, n.astype(o.dtype), o), new, old)

    # While a loss scale still falls, a skip is its search and no sign of divergence.
    settled = state.loss_scale is None or state.loss_scale.scale <= settings.loss_scaling.minimum
    skipped = state.skipped.count(finite, settled=settled)
    new_state = TrainState(
        step=state.step + 1,
        params=keep(params, state.params),
        optimizer_state=keep(optimizer_state, state.optimizer_state),
        model_state=keep(gradients.model_state, state.model_state),
        loss_scale=None if state.loss_scale is None else state.loss_scale.move(finite, settings.loss_scaling),
        key=state.key,
        skipped=skipped,
        ema=keep(ema, state.ema),
    )
    metrics = {
        "loss": loss,
        "grad_norm": grad_norm,
        "weight": gradients.weight,
        "skipped_steps": skipped.total,
        "skipped_in_a_row": skipped.in_a_row,
        **mean_metrics(gradients.metrics),
    }
    if settings.learning_rate is not None:
        # Skipped steps do not advance the optimizer, so they do not advance its schedule either.
        rate = settings.learning_rate(state.step - state.skipped.total)
        metrics["learning_rate"] = jnp.asarray(rate, jnp.float32)
    if state.loss_scale is not None:
        metrics["loss_scale"] = state.loss_scale.scale
    return new_state, metrics


def mean_metrics(sums: Sums) -> Metrics:
    """name -> sum / weight."""
    return {name: total / jnp.maximum(weight, 1e-9) for name, (total, weight) in sums.items()}
