"""What a step is made of, what it carries from one step to the next, and where each array of it is on the mesh."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config.arguments import check_kind
from jaxtrain.config.schema import SpikeRule
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import Layout, optimizer_shardings, parameter_shardings
from jaxtrain.models.model import Model, ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import Reference, Task
from jaxtrain.optim.offload import lives_on_host, on_host, to_host
from jaxtrain.parallel.division import check_whole_batch, microbatches_by_name
from jaxtrain.parallel.stage import Pipeline
from jaxtrain.precision.policy import LossScale, LossScaling, cast_floats
from jaxtrain.runtime.tree import merge_leaves, path_name
from jaxtrain.train.spikes import SpikeHistory, first_history

_PARTS = {
    "model": (Model, "a jaxtrain.Model", "jaxtrain.from_nnx(Net), from_linen, from_functions or build_model"),
    "task": (Task, "a jaxtrain.Task", "jaxtrain.classification() or jaxtrain.Task('name', loss)"),
    "optimizer": (
        optax.GradientTransformation,
        "an optax transformation",
        "optax.adamw(1e-3), and accumulation_steps in place of optax.MultiSteps",
    ),
}


def check_parts(**parts: Any) -> None:
    """Raise a `ConfigError` where a model, task or optimizer is something else; None: that of a config."""
    for name, value in parts.items():
        kind, takes, write = _PARTS[name]
        if value is not None:
            check_kind(value, kind, what=name, takes=takes, write=write)


@dataclass(frozen=True)
class StepSettings:
    """What a step does besides model, task and optimizer; see `make_train_step` for each.

    `zero` is the ZeRO stage over `data` (stage 3 is the `fsdp` axis), and `sliced_norm` says how the norm of the
    gradient is summed, see `gradient_norm`.
    """

    accumulation_steps: int
    clip_norm: float | None
    ema_decay: float | None
    trainable: Callable[[str], bool] | None
    learning_rate: optax.Schedule | None
    loss_scaling: LossScaling
    zero: int
    offload_optimizer: bool
    spikes: SpikeRule | None
    sliced_norm: bool

    def check(self, task: Task) -> None:
        """Raise a `ConfigError` where a number is out of range, or microbatches cannot compute a task."""
        if self.accumulation_steps < 1:
            raise ConfigError(f"accumulation_steps={self.accumulation_steps}; use a whole number from 1")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ConfigError(f"clip_norm={self.clip_norm}; use a number above 0 (None: no clipping)")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ConfigError(f"ema_decay={self.ema_decay}; use a number from 0 to below 1 (None: no moving average)")
        if task.rows == "global":
            check_whole_batch(self.accumulation_steps, task=task.name)

    @property
    def has_average(self) -> bool:
        """Whether the state holds a moving average."""
        return self.ema_decay is not None

    def average_decay(self, updates: jax.Array) -> jax.Array:
        """Return what the moving average keeps of itself after so many updates (int32 []): float32 [].

        It is (1 + t) / (10 + t), at most the decay that is set: of the first parameters, random numbers, 0.999 would
        keep much for long.

        Source: `tf.train.ExponentialMovingAverage` with `num_updates`, as in Tan and Le 2019 (EfficientNet).
        """
        assert self.ema_decay is not None
        t = updates.astype(jnp.float32)
        return jnp.minimum(self.ema_decay, (1 + t) / (10 + t))

    def clip_factor(self, grad_norm: jax.Array) -> jax.Array | None:
        """Return what gradients of this norm (float32 []) are multiplied by, float32 []; None: they are not clipped."""
        if self.clip_norm is None:
            return None
        return self.clip_norm / jnp.maximum(grad_norm, self.clip_norm)


@dataclass(frozen=True, eq=False)
class StepProgram:
    """What a train step is made of, which all of its pure functions take.

    Attributes:
        sharded_model: the model with its layout and number formats.
        task: what outputs are compared with.
        optimizer: what updates the trained parameters.
        settings: clipping, averages and the like.
        pipeline: the schedule of the stages; None: there is one stage.
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
    def microbatches(self) -> dict[str, int]:
        """The number of microbatches of a batch, under the name of the setting that gives it."""
        schedule = None if self.pipeline is None else self.pipeline.schedule
        return microbatches_by_name(schedule, self.settings.accumulation_steps)

    @property
    def powers_of_two(self) -> bool:
        """Whether loss sums are divided by a power of two before they are differentiated: where layers compute in fp8.

        See `parallel/microbatches.py`.
        """
        return self.sharded_model.policy.linear_format is not None

    def trained(self, params: Params) -> Params:
        """Return the parameters with None in place of those that are not trained."""
        return select_leaves(params, self.settings.trainable)

    def frozen(self, params: Params) -> Params:
        """Return the parameters with None in place of those that are trained."""
        trains = self.settings.trainable
        return select_leaves(params, lambda path: trains is not None and not trains(path))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SkippedSteps:
    """Steps that left the state as it was (not finite, a spike, no weight): `total`, and `in_a_row`; int32 [].

    Batches without any weight, and steps that are not finite while a loss scale can still fall, are not bad signs: they
    do not count in a row, and do not end a row either.
    """

    total: jax.Array
    in_a_row: jax.Array

    def count(self, accepted: jax.Array, *, is_bad: jax.Array) -> "SkippedSteps":
        """Return the counts after a step that was accepted or not, whose skip is a bad sign or not (bool [])."""
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
        params = len(jax.tree.leaves(self.params))
        optimizer = len(jax.tree.leaves(self.optimizer_state))
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
        return _cast_like(merge_leaves(self.ema_model_state, self.model_state), self.model_state)


def random_key(seed: Any) -> jax.Array:
    """Return the typed key of a seed: an integer of 32 bits, Python's or NumPy's, or a typed key already."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return seed
    seed = operator.index(seed)  # a TypeError where it is not a whole number
    if not -(2**31) <= seed < 2**32:
        raise ConfigError(f"seed {seed} has more than 32 bits, which jax would truncate; use a smaller one")
    # A seed is one number, which a user's guard need not ask about.
    with jax.transfer_guard("allow"):
        return jax.random.key(seed)


def create_state(
    program: StepProgram, key: jax.Array, *, params: Params | None = None, model_state: ModelState | None = None
) -> TrainState:
    """Create the state at step 0.

    Args:
        program: what the step is made of.
        key: a typed key.
        params, model_state: arrays to start from, of any float dtypes; None, also in place of single leaves: what the
            model draws.
    """
    settings = program.settings
    sharded_model = program.sharded_model
    init_key, run_key = jax.random.split(key)
    drawn_params, drawn_state = sharded_model.init(init_key)
    start: Params = drawn_params if params is None else merge_leaves(params, drawn_params)
    start_state: ModelState = drawn_state if model_state is None else merge_leaves(model_state, drawn_state)
    stored = _cast_like(start, sharded_model.abstract_params)
    start_state = _cast_like(start_state, sharded_model.abstract_model_state)
    # In float32 under every policy: gradients come in float32, and a second moment in bf16 would stand still.
    optimizer_state = program.optimizer.init(cast_floats(program.trained(stored), jnp.float32))
    if settings.offload_optimizer:
        optimizer_state = to_host(optimizer_state)
    ema = None
    ema_model_state = None
    if settings.has_average:
        ema = cast_floats(program.trained(start), jnp.float32)
        ema_model_state = floating_leaves(start_state)
    reference = None
    if program.task.reads_reference:
        reference = Reference(cast_floats(program.trained(stored), sharded_model.policy.compute_dtype), start_state)
    return TrainState(
        step=jnp.int32(0),
        params=stored,
        optimizer_state=optimizer_state,
        model_state=start_state,
        loss_scale=LossScale.create(settings.loss_scaling) if sharded_model.policy.loss_scaled else None,
        key=run_key,
        skipped=SkippedSteps(jnp.int32(0), jnp.int32(0)),
        ema=ema,
        ema_model_state=ema_model_state,
        spikes=None if settings.spikes is None else first_history(settings.spikes),
        reference=reference,
    )


def _cast_like(tree: Any, abstract: Any) -> Any:
    """Cast leaves to the dtypes that they are stored in."""
    return jax.tree.map(
        lambda leaf, like: leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype), tree, abstract
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


def floating_leaves(tree: Any) -> Any:
    """Return the floating leaves of a tree in float32, None in place of others (counts, keys)."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else None, tree
    )


def select_leaves(tree: Any, predicate: Callable[[str], bool] | None) -> Any:
    """Return the tree with None in place of the leaves whose path the predicate refuses (None is not a leaf to JAX)."""
    if predicate is None:
        return tree
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if predicate(path_name(path)) else None, tree)


def state_shardings(shapes: TrainState, program: StepProgram) -> TrainState:
    """Return a sharding for every leaf of a train state, which is given as `ShapeDtypeStruct`s."""
    layout = program.layout
    optimizer = optimizer_shardings(shapes.optimizer_state, shapes.params, layout)
    if program.settings.offload_optimizer:
        optimizer = on_host(optimizer, shapes.optimizer_state)
    replicated = NamedSharding(layout.mesh, PartitionSpec())
    everywhere: TrainState = jax.tree.map(lambda _: replicated, shapes)
    reference = None
    if shapes.reference is not None:
        params, model_state = shapes.reference
        reference = Reference(parameter_shardings(params, layout), jax.tree.map(lambda _: replicated, model_state))
    return replace(
        everywhere,
        params=jax.tree.map(lambda leaf: leaf.sharding, program.sharded_model.abstract_params),
        optimizer_state=optimizer,
        ema=parameter_shardings(shapes.ema, layout),
        reference=reference,
    )


def state_on_host(shapes: TrainState, program: StepProgram) -> TrainState:
    """Say of each leaf whether it is on the host, which shardings of compile-only GPUs cannot say (jax 0.10.2)."""
    nowhere: TrainState = jax.tree.map(lambda _: False, shapes)
    if not program.settings.offload_optimizer:
        return nowhere
    return replace(nowhere, optimizer_state=jax.tree.map(lives_on_host, shapes.optimizer_state))
