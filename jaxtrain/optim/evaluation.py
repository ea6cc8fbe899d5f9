"""Weights that an optimizer keeps for evaluation: the slow ones of Lookahead, the average of schedule-free methods."""

from collections.abc import Callable
from typing import Any

import jax
import optax.contrib
from jax.core import Tracer

from jaxtrain.layout.sharding import path_name
from jaxtrain.optim.lookahead import LookaheadState
from jaxtrain.runtime.tree import first_deleted, part_name

_KEEPERS = (LookaheadState, optax.contrib.ScheduleFreeState)
_FIELDS = {LookaheadState: "slow", optax.contrib.ScheduleFreeState: "z"}


def evaluation_weights(optimizer_state: Any, params: Any) -> Any:
    """The parameters with the weights in place that their optimizer keeps for evaluation.

    Args:
        optimizer_state: of any optimizer; those that keep such weights may be anywhere inside it (in a chain, or in
            one part of a partition).
        params: the parameters of the same train state, frozen ones included.

    Returns:
        A tree like `params`, in its dtypes and shardings; `params` itself where no such weights are kept.
    """
    weights: dict[str, Callable[[jax.Array], jax.Array]] = {}
    for node in jax.tree.leaves(optimizer_state, is_leaf=lambda node: isinstance(node, _KEEPERS)):
        if isinstance(node, LookaheadState):
            weights |= {path: _slow(leaf) for path, leaf in _by_path(node.slow).items()}
        elif isinstance(node, optax.contrib.ScheduleFreeState):
            weights |= {path: _average(leaf, node.b1) for path, leaf in _by_path(node.z).items()}
    # Arrays that a step took over are refused where they are used, in words of that place.
    if not weights or first_deleted((optimizer_state, params)) is not None:
        return params

    def one(path: tuple[Any, ...], param: jax.Array) -> jax.Array:
        chosen = weights.get(path_name(path))
        return param if chosen is None else chosen(param).astype(param.dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def kept_nodes(optimizer_state: Any) -> list[list[str]]:
    """Where an optimizer keeps weights for evaluation, for who reads its checkpoints without it.

    Args:
        optimizer_state: of any optimizer, as arrays or shapes.

    Returns:
        For each node its stored name in a train state (`optimizer_state.1`), and the field of its weights.
    """
    entries = jax.tree_util.tree_leaves_with_path(optimizer_state, is_leaf=lambda node: isinstance(node, _KEEPERS))
    return [
        [".".join(["optimizer_state", *map(part_name, path)]), _FIELDS[type(node)]]
        for path, node in entries
        if isinstance(node, _KEEPERS)
    ]


def _by_path(tree: Any) -> dict[str, jax.Array]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _near(leaf: jax.Array, param: jax.Array) -> jax.Array:
    """State that is kept on the host, or sharded over further axes, beside its parameter."""
    return leaf if isinstance(leaf, Tracer) else jax.device_put(leaf, param.sharding)


def _slow(leaf: jax.Array) -> Callable[[jax.Array], jax.Array]:
    return lambda param: _near(leaf, param)


def _average(z: jax.Array, b1: Any) -> Callable[[jax.Array], jax.Array]:
    # The formula of optax.contrib.schedule_free_eval_params, which takes whole states: x of y = (1 - b1) z + b1 x.
    return lambda param: (param - (1 - b1) * _near(z, param)) / b1
