"""Where each array of a train state lies: parameters by their table, what mirrors them alike, the rest everywhere."""

import dataclasses

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.sharding import Layout, check_replicated, optimizer_shardings, parameter_shardings
from jaxtrain.train.parallelism import Parallelism
from jaxtrain.train.state import TrainState


def state_shardings(shapes: TrainState, layout: Layout, parallelism: Parallelism) -> TrainState:
    """A sharding for every leaf of a train state.

    Args:
        shapes: the state as `ShapeDtypeStruct`s.
        layout: of the step.
        parallelism: its options.

    Raises:
        ConfigError: too many replicated bytes.
    """
    params = parameter_shardings(shapes.params, layout)
    # ZeRO-1: optimizer state (and the moving average) is spread over `data` besides `fsdp`.
    also = ("data",) if parallelism.zero in (1, 2) else ()
    check_replicated(shapes.params, params, layout.mesh, parallelism.max_replicated_fraction)
    whole = NamedSharding(layout.mesh, PartitionSpec())
    everywhere: TrainState = jax.tree.map(lambda _: whole, shapes)
    return dataclasses.replace(
        everywhere,
        params=params,
        optimizer_state=optimizer_shardings(shapes.optimizer_state, shapes.params, layout, also=also),
        ema=None if shapes.ema is None else parameter_shardings(shapes.ema, layout, also=also),
    )
