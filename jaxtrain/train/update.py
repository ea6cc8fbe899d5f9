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
from jaxtrain.precision.policy import LossScale, cast_floats
from jaxtrain.runtime.tree import merge_leaves
from jaxtrain.train.spikes import SpikeHistory
from jaxtrain.train.state import SkippedSteps, StepProgram, StepSettings, TrainState, floating_leaves

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
# Squares of a large array are added in slices, see `gradient_norm`; a smaller one is summed in microseconds.
_LARGE = 2**16
_SLICES = 16


def update_state(program: StepProgram, state: TrainState, gradients: Gradients) -> tuple[TrainState, Metrics]:
    """Return the state after a step, and what the step reports.

    Args:
        program: what the step is made of.
        state: before the step.
        gradients: of the mean loss times the loss scale of the state.
    """
    settings = program.settings
    gradient_tree = constrain_gradients(gradients.tree, program.layout)
    scale = None if state.loss_scale is None else state.loss_scale.scale
    grad_norm = gradient_norm(_unscaled(gradient_tree, scale), sliced=settings.sliced_norm)
    loss = gradients.loss_sum / divisor(gradients.weight)
    verdict = _judge(settings, state, gradients, loss, grad_norm)

    # It takes all arrays as arguments, because `update_on_host` traces it once for each piece of the optimizer state.
    def advance(gradients: Any, optimizer_state: Any, trained: Any, scalars: Any) -> tuple[Any, Any]:
        accepted, scale, clip_factor, loss = scalars
        updates = _unscaled(gradients, scale)
        if clip_factor is not None:
            updates = jax.tree.map(lambda g: g * clip_factor, updates)
        # In float32 as everything the optimizer reads: weight decay of bf16 parameters is rounded with the rest of the
        # update, not before.
        params = cast_floats(trained, jnp.float32)
        # Further arguments of optax: `value` is what momo and reduce_on_plateau read.
        optimizer = optax.with_extra_args_support(program.optimizer)
        updates, new_state = optimizer.update(updates, optimizer_state, params, value=loss)
        new_trained = optax.apply_updates(trained, updates)
        return _keep(new_trained, trained, accepted), _keep(new_state, optimizer_state, accepted)

    trained = program.trained(state.params)
    scalars = (verdict.accepted, scale, settings.clip_factor(grad_norm), loss)
    if settings.offload_optimizer:
        trained, optimizer_state = update_on_host(
            advance,
            gradient_tree,
            state.optimizer_state,
            trained,
            scalars,
            optimizer=program.optimizer,
            layout=program.layout,
        )
    else:
        trained, optimizer_state = advance(gradient_tree, state.optimizer_state, trained, scalars)
    ema, ema_model_state = _averages(settings, state, trained, gradients.model_state, verdict.accepted)
    new_state = TrainState(
        step=state.step + 1,
        params=merge_leaves(trained, state.params),
        optimizer_state=optimizer_state,
        model_state=_keep(gradients.model_state, state.model_state, verdict.accepted),
        loss_scale=_next_loss_scale(settings, state.loss_scale, verdict),
        key=state.key,
        skipped=_count_skipped(settings, state, verdict),
        ema=ema,
        ema_model_state=ema_model_state,
        spikes=verdict.history,
        reference=state.reference,
    )
    return new_state, _metrics(settings, state, new_state, gradients, grad_norm, verdict)


@dataclass(frozen=True)
class _Verdict:
    """How a step is judged, bool [] each.

    Attributes:
        finite: whether its loss and gradients are finite.
        nonempty: whether its batch has a weight, a loss or a gradient.
        accepted: whether it changes the state: it is finite, not empty, and not a spike.
        spiked: whether it is a spike; None: spikes are not looked for.
        history: what the next steps are compared with; None: spikes are not looked for.
    """

    finite: jax.Array
    nonempty: jax.Array
    accepted: jax.Array
    spiked: jax.Array | None = None
    history: SpikeHistory | None = None

    @property
    def counts(self) -> jax.Array:
        """Whether the step tells of divergence and of the loss scale: gradients of 0 for want of a weight do not."""
        return self.nonempty | ~self.finite


def _judge(
    settings: StepSettings, state: TrainState, gradients: Gradients, loss: jax.Array, grad_norm: jax.Array
) -> _Verdict:
    """Judge a step by its mean loss and the norm of its gradients (float32 [])."""
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    # A batch without any weight says nothing: momentum and decay would move parameters by it, and its sum of 0 would be
    # the best loss ever to an optimizer that reads one. Weights of both signs may sum to 0 too, and say something.
    has_weight = gradients.weight != 0
    nonempty = has_weight | (gradients.loss_sum != 0) | (grad_norm != 0)
    accepted = finite & nonempty
    if settings.spikes is None or state.spikes is None:
        return _Verdict(finite, nonempty, accepted)
    # A loss that is not divided by a weight cannot be compared with others.
    spiked = accepted & has_weight & state.spikes.is_spike(loss, grad_norm, settings.spikes)
    accepted = accepted & ~spiked
    history = state.spikes.after(loss, grad_norm, accepted=accepted & has_weight, spiked=spiked)
    return _Verdict(finite, nonempty, accepted, spiked, history)


def _next_loss_scale(settings: StepSettings, loss_scale: LossScale | None, verdict: _Verdict) -> LossScale | None:
    if loss_scale is None:
        return None
    return _keep(loss_scale.move(verdict.finite, settings.loss_scaling), loss_scale, verdict.counts)


def _count_skipped(settings: StepSettings, state: TrainState, verdict: _Verdict) -> SkippedSteps:
    # While a loss scale still falls, a skip is its search and not a sign of divergence.
    is_bad = jnp.bool_(True)
    if state.loss_scale is not None:
        is_bad = state.loss_scale.scale <= settings.loss_scaling.minimum
    if verdict.spiked is not None:
        is_bad = is_bad | verdict.spiked
    return state.skipped.count(verdict.accepted, is_bad=is_bad & verdict.counts)


def _keep(new: Any, old: Any, accepted: jax.Array) -> Any:
    """Return the new leaves if the step is accepted, else the old ones; in the dtypes of the old ones."""
    # A select, not a product with zero: NaN times zero is NaN.
    return jax.tree.map(lambda n, o: jnp.where(accepted, n.astype(o.dtype), o), new, old)


def _averages(
    settings: StepSettings, state: TrainState, trained: Any, model_state: Any, accepted: jax.Array
) -> tuple[Any, Any]:
    """Return the moving averages of parameters and model_state after a step; both None where there are none."""
    averages = (state.ema, state.ema_model_state)
    if not settings.has_average:
        return averages
    decay = settings.average_decay(state.step - state.skipped.total)
    values = (trained, floating_leaves(model_state))
    new_averages = jax.tree.map(lambda a, x: decay * a + (1 - decay) * x.astype(a.dtype), averages, values)
    return _keep(new_averages, averages, accepted)


def _metrics(
    settings: StepSettings,
    state: TrainState,
    new_state: TrainState,
    gradients: Gradients,
    grad_norm: jax.Array,
    verdict: _Verdict,
) -> Metrics:
    metrics = {
        "loss": _mean_or_nan(gradients.loss_sum, gradients.weight),
        "grad_norm": grad_norm,
        "weight": gradients.weight,
        "skipped_steps": new_state.skipped.total,
        "skipped_in_a_row": new_state.skipped.in_a_row,
    }
    if verdict.spiked is not None and verdict.history is not None:
        metrics["spiked"] = verdict.spiked.astype(jnp.int32)
        metrics["spikes"] = verdict.history.spikes
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
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if x.size < _LARGE or x.size % _SLICES:
        return jnp.sum(jnp.square(x))
    slices = jax.lax.split(x.reshape(_SLICES, -1), (1,) * _SLICES)
    return jnp.sum(functools.reduce(jnp.add, map(jnp.square, slices)))


def _unscaled(tree: Any, scale: jax.Array | None) -> Any:
    """Return gradients in float32, divided by the loss scale if there is one."""
    tree = cast_floats(tree, jnp.float32)
    if scale is None:
        return tree
    return jax.tree.map(lambda g: g / scale, tree)


def mean_metrics(sums: Sums) -> Metrics:
    """Return name -> sum / weight, NaN where the weight is 0; totals, which have no weight, as they are."""
    means = {}
    for name, pair in sums.items():
        total, weight = sum_ratios(*pair)
        means[name] = total if weight is None else _mean_or_nan(total, weight)
    return means


def _mean_or_nan(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Return a mean, NaN where there is no weight and so no mean."""
    return jnp.where(weight != 0, total / divisor(weight), jnp.nan)
