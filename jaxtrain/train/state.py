"""What a step carries from one step to the next, and where each array of it is on the mesh."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.layout.sharding import optimizer_shardings, parameter_shardings, path_name
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel, with_sharding
from jaxtrain.optim.offload import lives_on_host, on_host
from jaxtrain.optim.wrappers import evaluation_weights
from jaxtrain.precision.policy import LossScale, cast_floats
from jaxtrain.train.spikes import SpikeHistory


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SkippedSteps:
    """Steps that left the state as it was (not finite, a spike, no weight): `total`, and `in_a_row`; int32 [].

    Batches without any weight, and steps that are not finite while a loss scale can still fall, are no bad signs: they
    do not count in a row, and do not end a row either.
    """

    total: jax.Array
    in_a_row: jax.Array

    def count(self, accepted: jax.Array, *, settled: jax.Array | bool) -> "SkippedSteps":
        """The counts after a step that was accepted or not (bool []), whose skip is a bad sign where `settled`."""
        skipped = jnp.where(accepted, 0, 1).astype(jnp.int32)
        in_a_row = self.in_a_row + jnp.where(settled, 1, 0).astype(jnp.int32)
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

    def __repr__(self) -> str:
        # Any leaf may be a shape, a sharding or donated: what is shown asks none of them.
        params, optimizer = (len(jax.tree.leaves(tree)) for tree in (self.params, self.optimizer_state))
        average = "" if self.ema is None else ", a moving average"
        return f"TrainState: {params} arrays of parameters, {optimizer} of optimizer state{average}"

    @property
    def evaluation_params(self) -> Params:
        """The parameters to evaluate: the moving average where there is one, frozen ones as they are.

        Without a moving average, the weights that the optimizer keeps for evaluation: the slow ones of
        `jaxtrain.lookahead`, the averaged ones of `optax.contrib.schedule_free`.
        """
        if self.ema is None:
            return evaluation_weights(self.optimizer_state, self.params)
        return merge_leaves(self.ema, self.params)

    @property
    def evaluation_model_state(self) -> ModelState:
        """The model_state that belongs to `evaluation_params`: its average where parameters have one.

        Batch statistics of the raw parameters would not fit the activations of averaged ones.
        """
        if self.ema is None or self.ema_model_state is None:
            return self.model_state
        return averaged_model_state(self.ema_model_state, self.model_state)


@dataclass(frozen=True)
class EvaluationState:
    """What evaluation reads of a train state, for parameters that no state holds.

    Attributes:
        evaluation_params: the parameters to evaluate.
        evaluation_model_state: the model_state that belongs to them.
        step: steps that were done to get them.

    Example:
        >>> found = jt.EvaluationState(state.params, state.model_state)
        >>> sorted(jt.Evaluator(step)(found, [step.loader(batches)(0)]))
        ['eval_accuracy', 'eval_loss']
    """

    evaluation_params: Params = field(repr=False)
    evaluation_model_state: ModelState = field(repr=False)
    step: int = 0


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


def paths_of(tree: Any) -> dict[str, Any]:
    """Path of each leaf -> the leaf."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def select_leaves(tree: Any, predicate: Callable[[str], bool] | None) -> Any:
    """The tree with None in place of the leaves whose path the predicate refuses (None is no leaf to JAX)."""
    if predicate is None:
        return tree
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if predicate(path_name(path)) else None, tree)


def frozen_leaves(tree: Any, predicate: Callable[[str], bool] | None) -> Any:
    """The tree with None in place of the leaves that `select_leaves` keeps."""
    return select_leaves(tree, lambda path: predicate is not None and not predicate(path))


def merge_leaves(chosen: Any, rest: Any) -> Any:
    """The tree whose leaves come from `chosen`, and from `rest` where `chosen` has None."""
    return jax.tree.map(lambda a, b: b if a is None else a, chosen, rest, is_leaf=lambda leaf: leaf is None)


def state_shardings(shapes: TrainState, sharded_model: ShardedModel, *, offload_optimizer: bool = False) -> TrainState:
    """A sharding for every leaf of a train state.

    Args:
        shapes: the state as `ShapeDtypeStruct`s.
        sharded_model: that the state trains.
        offload_optimizer: whether arrays of optimizer state are kept in the host's memory.
    """
    layout = sharded_model.layout
    optimizer = optimizer_shardings(shapes.optimizer_state, shapes.params, layout, also=layout.state_axes)
    replicated = NamedSharding(layout.mesh, PartitionSpec())
    everywhere: TrainState = jax.tree.map(lambda _: replicated, shapes)
    return replace(
        everywhere,
        params=jax.tree.map(lambda leaf: leaf.sharding, sharded_model.abstract_params),
        optimizer_state=on_host(optimizer, shapes.optimizer_state) if offload_optimizer else optimizer,
        ema=None if shapes.ema is None else parameter_shardings(shapes.ema, layout, also=layout.state_axes),
    )


def state_on_host(shapes: TrainState, *, offload_optimizer: bool) -> TrainState:
    """Whether each leaf of a train state is kept in the host's memory.

    Not read off shardings: those of compile-only GPUs do not know (jax 0.10.2).
    """
    nowhere: TrainState = jax.tree.map(lambda _: False, shapes)
    if not offload_optimizer:
        return nowhere
    return replace(nowhere, optimizer_state=jax.tree.map(lives_on_host, shapes.optimizer_state))


def average_shapes(sharded_model: ShardedModel, trainable: Callable[[str], bool] | None) -> tuple[Params, ModelState]:
    """The moving averages of a run as shapes with shardings, to restore them without the rest of its state.

    Args:
        sharded_model: the model that was trained.
        trainable: parameter path -> whether it was trained; None: all were.

    Returns:
        The averages of its trained parameters, None in place of others, and of the floating leaves of its model_state.
    """
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
        jax.tree.map(with_sharding, params, parameter_shardings(params, layout, also=layout.state_axes)),
        jax.tree.map(lambda leaf: with_sharding(leaf, replicated), model_state),
    )
