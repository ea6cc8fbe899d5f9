"""Where each array of a train state is: parameters by their specs, what mirrors them too, the rest on every device."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.layout.sharding import optimizer_shardings, parameter_shardings
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel, with_sharding
from jaxtrain.optim.offload import lives_on_host, on_host
from jaxtrain.precision.policy import cast_floats
from jaxtrain.train.state import TrainState, floating_leaves, select_leaves


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
    return dataclasses.replace(
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
    return dataclasses.replace(nowhere, optimizer_state=jax.tree.map(lives_on_host, shapes.optimizer_state))


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
