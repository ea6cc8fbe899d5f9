"""What a step is made of, what it carries from one step to the next, and where each array of it is on the mesh."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import stage_over_data
from jaxtrain.layout.sharding import Layout, optimizer_shardings, parameter_shardings
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel, stored_params, with_sharding
from jaxtrain.models.task import Reference, Task
from jaxtrain.optim.offload import lives_on_host, on_host, to_host
from jaxtrain.parallel.division import check_whole_batch
from jaxtrain.parallel.stage import Pipeline
from jaxtrain.precision.policy import LossScale, LossScaling, cast_floats
from jaxtrain.runtime.tree import merge_leaves, path_name
from jaxtrain.train.parallelism import Parallelism
from jaxtrain.train.spikes import SpikeHistory, SpikeRule, first_history


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

    def check(self, task: Task) -> None:
        """Raise a `ConfigError` where a number is out of range, or microbatches cannot compute a task."""
        steps, clip, decay = self.accumulation_steps, self.clip_norm, self.ema_decay
        if steps < 1 or (clip is not None and clip <= 0) or not 0 <= (decay or 0) < 1:
            raise ConfigError(
                f"accumulation_steps={steps}, clip_norm={clip}, ema_decay={decay}; use a whole number from 1, a number "
                "above 0 (None: no clipping) and one from 0 to below 1"
            )
        if task.rows == "global":
            check_whole_batch(steps, task=task.name)


@dataclass(frozen=True, eq=False)
class StepProgram:
    """What a train step is made of, which all of its pure functions take.

    The model with its layout and number formats, what outputs are compared with, what updates the trained parameters,
    clipping, averages and the like, and the schedule of the stages (None: there is one).
    """

    sharded_model: ShardedModel
    task: Task
    optimizer: optax.GradientTransformation
    settings: StepSettings
    pipeline: Pipeline | None

    @property
    def layout(self) -> Layout:
        """The layout of the model on the mesh."""
        return self.sharded_model.layout

    @property
    def powers_of_two(self) -> bool:
        """Whether losses are differentiated over a power of two, see `parallel/microbatches.py`."""
        return self.sharded_model.policy.linear_format is not None

    def trained(self, params: Params) -> Params:
        """The parameters with None in place of those that are not trained."""
        return select_leaves(params, self.settings.trainable)

    def frozen(self, params: Params) -> Params:
        """The parameters with None in place of those that are trained."""
        trains = self.settings.trainable
        return select_leaves(params, lambda path: trains is not None and not trains(path))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SkippedSteps:
    """Steps that left the state as it was (not finite, a spike, no weight): `total`, and `in_a_row`; int32 [].

    Batches without any weight, and steps that are not finite while a loss scale can still fall, are no bad signs: they
    do not count in a row, and do not end a row either.
    """

    total: jax.Array
    in_a_row: jax.Array

    def count(self, accepted: jax.Array, *, is_bad: jax.Array | bool) -> "SkippedSteps":
        """The counts after a step that was accepted or not (bool []), whose skip is a bad sign or none."""
        skipped = jnp.where(accepted, 0, 1).astype(jnp.int32)
        in_a_row = self.in_a_row + jnp.where(is_bad, 1, 0).astype(jnp.int32)
        return SkippedSteps(self.total + skipped, in_a_row * skipped)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The complete state of training; its structure never changes during a run.

    To start from other parameters, call `step.init(seed, params=params)`: `dataclasses.replace(state, params=params)`
    leaves the moving average, which evaluation uses, and an optimizer's copies at the old ones.

    Attributes:
        step: int32 [], steps done (skipped ones included): the index of the next batch.
        params: nested dict of arrays in the policy's param dtype.
        optimizer_state: optax state of the trainable parameters.
        model_state: nested dict of what changes without a gradient.
        loss_scale: fp16 only, else None.
        key: typed PRNG key; every random number of step k derives from `fold_in(key, k)`.
        skipped: counts of non-finite steps, spikes, and batches without any weight.
        ema: moving average of the trainable params in float32, or None.
        ema_model_state: the same average of the floating leaves of model_state, None where ema is.
        spikes: the losses and gradient norms that spikes are told by, or None.
        reference: the model that training started from, of a task that compares with it, else None.

    Example:
        >>> state = step.init(0)
        >>> int(state.step), state.params["kernel"].shape
        (0, (4, 3))
        >>> state, metrics = step(state, step.loader(batches)(0))
        >>> int(state.step)
        1
    """

    step: jax.Array
    params: Params
    optimizer_state: optax.OptState
    model_state: ModelState
    loss_scale: LossScale | None
    key: jax.Array
    skipped: SkippedSteps
    ema: Params | None = None
    ema_model_state: ModelState | None = None
    spikes: SpikeHistory | None = None
    reference: Reference | None = None

    def __repr__(self) -> str:
        # Any leaf may be a shape, a sharding or donated: what is shown asks none of them.
        params, optimizer = (len(jax.tree.leaves(tree)) for tree in (self.params, self.optimizer_state))
        average = "" if self.ema is None else ", a moving average"
        return f"TrainState: {params} arrays of parameters, {optimizer} of optimizer state{average}"

    @property
    def evaluation_params(self) -> Params:
        """The parameters to evaluate: the moving average where there is one, frozen ones as they are."""
        return self.params if self.ema is None else merge_leaves(self.ema, self.params)

    @property
    def evaluation_model_state(self) -> ModelState:
        """The model_state that belongs to `evaluation_params`: its average where parameters have one."""
        if self.ema is None or self.ema_model_state is None:
            return self.model_state
        return averaged_model_state(self.ema_model_state, self.model_state)


def random_key(seed: Any) -> jax.Array:
    """The typed key of a seed: an integer of 32 bits, Python's or NumPy's, or a typed key already."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return seed
    seed = operator.index(seed)  # a TypeError where it is no whole number
    if not -(2**31) <= seed < 2**32:
        raise ConfigError(f"seed {seed} has more than 32 bits, which jax would truncate; use a smaller one")
    # A seed is one number, which a user's guard need not ask about.
    with jax.transfer_guard("allow"):
        return jax.random.key(seed)


def create_state(
    program: StepProgram, key: jax.Array, *, params: Params | None = None, model_state: ModelState | None = None
) -> TrainState:
    """The state at step 0, from a typed key and what is given; None, also in place of single leaves: what is drawn."""
    settings, policy = program.settings, program.sharded_model.policy
    init_key, run_key = jax.random.split(key)
    drawn = program.sharded_model.init(init_key)
    start: Params = drawn[0] if params is None else merge_leaves(params, drawn[0])
    start_state: ModelState = drawn[1] if model_state is None else merge_leaves(model_state, drawn[1])
    averaged = settings.ema_decay is not None
    ema = cast_floats(program.trained(start), jnp.float32) if averaged else None
    stored = stored_params(program.sharded_model.model, start, policy, settings.trainable)
    # In float32 under every policy: gradients come in float32, and a second moment in bf16 would stand still.
    optimizer_state = program.optimizer.init(cast_floats(program.trained(stored), jnp.float32))
    reference = None
    if program.task.reads_reference:
        reference = Reference(cast_floats(program.trained(stored), policy.compute_dtype), start_state)
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
        reference=reference,
    )


@dataclass(frozen=True)
class EvaluationState:
    """What evaluation reads of a train state, for parameters that no state holds.

    Attributes:
        evaluation_params: the parameters to evaluate.
        evaluation_model_state: the model_state that belongs to them.
        step: steps that were done to get them.
        reference: the model that training started from, as in `TrainState`.

    Example:
        >>> found = jt.EvaluationState(state.params, state.model_state)
        >>> sorted(jt.Evaluator(step)(found, [step.loader(batches)(0)]))
        ['eval_accuracy', 'eval_loss']
    """

    evaluation_params: Params = field(repr=False)
    evaluation_model_state: ModelState = field(repr=False)
    step: int = 0
    reference: Reference | None = field(default=None, repr=False)


def averaged_model_state(average: ModelState, model_state: ModelState) -> ModelState:
    """A model_state with its average, in its own dtypes, in place of the leaves that have one (not None)."""

    def chosen(average: Any, leaf: Any) -> Any:
        if average is None:
            return leaf
        return average if average.dtype == leaf.dtype else average.astype(leaf.dtype)

    return jax.tree.map(chosen, average, model_state, is_leaf=lambda leaf: leaf is None)


def floating_leaves(tree: Any) -> Any:
    """The floating leaves of a tree in float32, None in place of others (counts, keys)."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else None, tree
    )


def select_leaves(tree: Any, predicate: Callable[[str], bool] | None) -> Any:
    """The tree with None in place of the leaves whose path the predicate refuses (None is no leaf to JAX)."""
    if predicate is None:
        return tree
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if predicate(path_name(path)) else None, tree)


def state_shardings(shapes: TrainState, sharded_model: ShardedModel, *, offload_optimizer: bool = False) -> TrainState:
    """A sharding for every leaf of a train state.

    `shapes` is the state as `ShapeDtypeStruct`s; offloaded arrays of optimizer state are kept in the host's memory.
    """
    layout = sharded_model.layout
    optimizer = optimizer_shardings(shapes.optimizer_state, shapes.params, layout)
    replicated = NamedSharding(layout.mesh, PartitionSpec())
    everywhere: TrainState = jax.tree.map(lambda _: replicated, shapes)
    reference = None
    if shapes.reference is not None:
        params, model_state = shapes.reference
        reference = Reference(parameter_shardings(params, layout), jax.tree.map(lambda _: replicated, model_state))
    return replace(
        everywhere,
        params=jax.tree.map(lambda leaf: leaf.sharding, sharded_model.abstract_params),
        optimizer_state=on_host(optimizer, shapes.optimizer_state) if offload_optimizer else optimizer,
        ema=parameter_shardings(shapes.ema, layout),
        reference=reference,
    )


def state_on_host(shapes: TrainState, *, offload_optimizer: bool) -> TrainState:
    """Whether each leaf of a state is on the host, which shardings of compile-only GPUs cannot say (jax 0.10.2)."""
    nowhere: TrainState = jax.tree.map(lambda _: False, shapes)
    if not offload_optimizer:
        return nowhere
    return replace(nowhere, optimizer_state=jax.tree.map(lives_on_host, shapes.optimizer_state))


def average_shapes(sharded_model: ShardedModel, trainable: Callable[[str], bool] | None) -> tuple[Params, ModelState]:
    """The moving averages of trained parameters and of model_state as shapes with shardings, to restore them alone."""
    layout = sharded_model.layout
    params, model_state = jax.eval_shape(
        lambda params, model_state: (
            cast_floats(select_leaves(params, trainable), jnp.float32),
            floating_leaves(model_state),
        ),
        sharded_model.abstract_params,
        sharded_model.abstract_model_state,
    )
    replicated = NamedSharding(layout.mesh, PartitionSpec())
    return (
        jax.tree.map(with_sharding, params, parameter_shardings(params, layout)),
        jax.tree.map(lambda leaf: with_sharding(leaf, replicated), model_state),
    )
