"""Where each array of a train state lies: parameters by their table, what mirrors them alike, the rest everywhere."""

import dataclasses

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.layout.sharding import Layout, check_replicated, optimizer_shardings, parameter_shardings
from jaxtrain.layout.zero import zero_axes
from jaxtrain.optim.offload import lives_on_host, on_host
from jaxtrain.train.parallelism import Parallelism
from jaxtrain.train.state import TrainState


def state_shardings(
    shapes: TrainState, layout: Layout, parallelism: Parallelism, *, offload_optimizer: bool = False
) -> TrainState:
    """A sharding for every leaf of a train state.

    Args:
        shapes: the state as `ShapeDtypeStruct`s.
        layout: of the step.
        parallelism: its options.
        offload_optimizer: arrays of optimizer state lie in the host's memory.

    Raises:
        ConfigError: too many replicated bytes.
    """
    params = parameter_shardings(shapes.params, layout)
    also = zero_axes(parallelism.zero)
    optimizer = optimizer_shardings(shapes.optimizer_state, shapes.params, layout, also=also)
    check_replicated(shapes.params, params, layout.mesh, parallelism.max_replicated_fraction)
    whole = NamedSharding(layout.mesh, PartitionSpec())
    everywhere: TrainState = jax.tree.map(lambda _: whole, shapes)
    return dataclasses.replace(
        everywhere,
        params=params,
        optimizer_state=on_host(optimizer, shapes.optimizer_state) if offload_optimizer else optimizer,
        ema=None if shapes.ema is None else parameter_shardings(shapes.ema, layout, also=also),
    )


def state_on_host(shapes: TrainState, *, offload_optimizer: bool) -> TrainState:
    """Whether each leaf of a train state lies in the host's memory.

    Not read off shardings: those of compile-only GPUs do not know (jax 0.10.2).
    """
    nowhere: TrainState = jax.tree.map(lambda _: False, shapes)
    if not offload_optimizer:
        return nowhere
    return dataclasses.replace(nowhere, optimizer_state=jax.tree.map(lives_on_host, shapes.optimizer_state))
