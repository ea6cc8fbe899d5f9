"""From gradients to the next state: clipping, the optimizer, the moving average, the guard against bad steps."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.models.task import Sums, divisor, sum_ratios
from jaxtrain.optim.offload import update_on_host
from jaxtrain.parallel.gradients import Gradients, constrain_gradients
from jaxtrain.precision.policy import cast_floats
from jaxtrain.runtime.tree import merge_leaves
from jaxtrain.train.spikes import SpikeHistory
from jaxtrain.train.state import StepProgram, StepSettings, TrainState, floating_leaves

Metrics = dict[str, jax.Array]
# What a step reports besides its loss and the metrics of the task.
STEP_METRICS = (
    "grad_norm",
    "weight",
    "skipped_steps",
    "skipped_in_a_row",
    "spiked",
    "spikes",
    "learning_rate",
    "loss_scale",
)
# Arrays of fewer elements are summed in microseconds.
_LARGE = 2**16
_SLICES = 16


def update_state(
    program: StepProgram, state: TrainState, gradients: Gradients, scale: jax.Array
) -> tuple[TrainState, Metrics]:
    """The state after a step, and what the step reports; `gradients` are times the loss scale (float32 [])."""
    settings, layout, trained = program.settings, program.layout, program.trained(state.params)
    tree = constrain_gradients(gradients.tree, layout)
    unscale = scale if state.loss_scale is not None else None
    grad_norm = gradient_norm(_unscaled(tree, unscale), sliced=settings.sliced_norm)
    loss = gradients.loss_sum / divisor(gradients.weight)
    found = _judge(state, gradients, loss, grad_norm, settings)

    def advance(gradients: Any, optimizer_state: Any, trained: Any, scalars: Any) -> tuple[Any, Any]:
        accepted, scale, clip, loss = scalars
        updates = _unscaled(gradients, scale)
        if clip is not None:
            updates = jax.tree.map(lambda g: g * clip, updates)
        # In float32 as everything the optimizer reads: weight decay of bf16 parameters is rounded with the rest of the
        # update, not before.
        read = cast_floats(trained, jnp.float32)
        # Further arguments of optax: `value` is what momo and reduce_on_plateau read.
        optimizer = optax.with_extra_args_support(program.optimizer)
        updates, moved = optimizer.update(updates, optimizer_state, read, value=loss)
        moved = _keep(moved, optimizer_state, accepted)
        return _keep(optax.apply_updates(trained, updates), trained, accepted), moved

    limit = settings.clip_norm
    clip = None if limit is None else limit / jnp.maximum(grad_norm, limit)
    before = (tree, state.optimizer_state, trained, (found.accepted, unscale, clip, loss))
    if settings.offload_optimizer:
        trained, optimizer_state = update_on_host(advance, *before, optimizer=program.optimizer, layout=layout)
    else:
        trained, optimizer_state = advance(*before)
    ema, ema_model_state = _averages(state, trained, gradients.model_state, found.accepted, settings)
    loss_scale = state.loss_scale
    # While a loss scale still falls, a skip is its search and no sign of divergence.
    settled = loss_scale is None or loss_scale.scale <= settings.loss_scaling.minimum
    is_bad = settled if found.spiked is None else settled | found.spiked
    says = found.weighs | ~found.finite
    if loss_scale is not None:
        # Gradients that are 0 for want of a weight are no sign that the scale could grow.
        loss_scale = _keep(loss_scale.move(found.finite, settings.loss_scaling), loss_scale, says)
    new_state = TrainState(
        step=state.step + 1,
        params=merge_leaves(trained, state.params),
        optimizer_state=optimizer_state,
        model_state=_keep(gradients.model_state, state.model_state, found.accepted),
        loss_scale=loss_scale,
        key=state.key,
        skipped=state.skipped.count(found.accepted, is_bad=is_bad & says),
        ema=ema,
        ema_model_state=ema_model_state,
        spikes=found.history,
        reference=state.reference,
    )
    return new_state, _metrics(state, new_state, gradients, grad_norm, found, settings)


@dataclass(frozen=True)
class _Verdict:
    """What a step is found to be: bool [] each; `accepted`: it changes the state; `weighs`: it says anything at all."""

    accepted: jax.Array
    finite: jax.Array
    weighs: jax.Array
    spiked: jax.Array | None
    history: SpikeHistory | None


def _judge(
    state: TrainState, gradients: Gradients, loss: jax.Array, grad_norm: jax.Array, settings: StepSettings
) -> _Verdict:
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    # A batch without any weight says nothing: momentum and decay would move parameters by it, and its sum of 0 would be
    # the best loss ever to an optimizer that reads one. Weights of both signs may sum to 0 too, and say something.
    has_weight = gradients.weight != 0
    weighs = has_weight | (gradients.loss_sum != 0) | (grad_norm != 0)
    accepted, history = finite & weighs, state.spikes
    if settings.spikes is None or history is None:
        return _Verdict(accepted, finite, weighs, None, history)
    # A loss that is not divided by a weight cannot be compared with others.
    spiked = accepted & has_weight & history.spiked(loss, grad_norm, settings.spikes)
    accepted = accepted & ~spiked
    history = history.after(loss, grad_norm, accepted=accepted & has_weight, spiked=spiked)
    return _Verdict(accepted, finite, weighs, spiked, history)


def _keep(new: Any, old: Any, accepted: jax.Array) -> Any:
    """The new leaves where a step is accepted, in the dtypes of the old ones, whatever an optimizer makes of them."""
    # A select, not a product with zero: NaN times zero is NaN.
    return jax.tree.map(lambda n, o: jnp.where(accepted, n.astype(o.dtype), o), new, old)


def _averages(
    state: TrainState, trained: Any, model_state: Any, accepted: jax.Array, settings: StepSettings
) -> tuple[Any, Any]:
    """The moving averages of parameters and model_state after a step; both None where there are none."""
    averages = (state.ema, state.ema_model_state)
    if settings.ema_decay is None:
        return averages
    decay = average_decay(settings.ema_decay, state.step - state.skipped.total)
    values = (trained, floating_leaves(model_state))
    moved = jax.tree.map(lambda e, x: decay * e + (1 - decay) * x.astype(e.dtype), averages, values)
    return _keep(moved, averages, accepted)


def _metrics(
    state: TrainState,
    new_state: TrainState,
    gradients: Gradients,
    grad_norm: jax.Array,
    found: _Verdict,
    settings: StepSettings,
) -> Metrics:
    metrics = {
        "loss": _mean_or_nan(gradients.loss_sum, gradients.weight),
        "grad_norm": grad_norm,
        "weight": gradients.weight,
        "skipped_steps": new_state.skipped.total,
        "skipped_in_a_row": new_state.skipped.in_a_row,
    }
    if found.spiked is not None and found.history is not None:
        metrics |= {"spiked": found.spiked.astype(jnp.int32), "spikes": found.history.spikes}
    metrics |= mean_metrics(gradients.metrics)
    # Skipped steps do not advance the optimizer, so they do not advance its schedule either.
    if settings.learning_rate is not None:
        rate = settings.learning_rate(state.step - state.skipped.total)
        metrics["learning_rate"] = jnp.asarray(rate, jnp.float32)
    if state.loss_scale is not None:
        metrics["loss_scale"] = state.loss_scale.scale
    return metrics


def gradient_norm(tree: Any, *, sliced: bool) -> jax.Array:
    """Compute the root of the sum of all squares of float32 or complex64 gradients, float32 [].

    XLA on CPU writes the squares of an array to memory and adds them in three further kernels, on which a step of
    ResNet-50 spent a fifth of its time. Sixteen slices of an array, whose squares are added to one another first, are
    read once (docs/benchmarks.md has both times): `sliced`, for arrays that are on one device.
    """
    leaves = jax.tree.leaves(tree)
    if not sliced or not leaves:
        return optax.tree.norm(tree)
    return jnp.sqrt(functools.reduce(jnp.add, map(_sum_of_squares, leaves)))


def _sum_of_squares(x: jax.Array) -> jax.Array:
    x = x if not jnp.iscomplexobj(x) else jnp.stack([x.real, x.imag])
    if x.size < _LARGE or x.size % _SLICES:
        return jnp.sum(jnp.square(x))
    parts = jax.lax.split(x.reshape(_SLICES, -1), (1,) * _SLICES)
    return jnp.sum(functools.reduce(jnp.add, map(jnp.square, parts)))


def _unscaled(tree: Any, scale: jax.Array | None) -> Any:
    """Gradients in float32, divided by the loss scale where there is one."""
    tree = cast_floats(tree, jnp.float32)
    return tree if scale is None else jax.tree.map(lambda g: g / scale, tree)


def average_decay(decay: float, updates: jax.Array) -> jax.Array:
    """What a moving average keeps of itself after so many finite updates (int32 []): float32 [].

    (1 + t) / (10 + t), at most `decay`: of the first parameters, random numbers, 0.999 would keep much for long.

    Source: `tf.train.ExponentialMovingAverage` with `num_updates`, as in Tan and Le 2019 (EfficientNet).
    """
    t = updates.astype(jnp.float32)
    return jnp.minimum(decay, (1 + t) / (10 + t))


def mean_metrics(sums: Sums) -> Metrics:
    """name -> sum / weight, NaN where the weight is 0; totals, which have no weight, as they are."""
    means = {}
    for name, pair in sums.items():
        total, weight = sum_ratios(*pair)
        means[name] = total if weight is None else _mean_or_nan(total, weight)
    return means


def _mean_or_nan(total: jax.Array, weight: jax.Array) -> jax.Array:
    """A mean, NaN where there is no weight and so no mean."""
    return jnp.where(weight != 0, total / divisor(weight), jnp.nan)
