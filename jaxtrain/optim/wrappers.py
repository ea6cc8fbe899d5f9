"""Optimizers around optimizers: groups of parameters, Lookahead, the promise `elementwise`, and weights for evaluation.

As any wrapper of optax, each hands on whatever the step gives to those that it wraps.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.core import Tracer

from jaxtrain.errors import ConfigError
from jaxtrain.optim.rules import check_groups, group_number
from jaxtrain.runtime.tree import first_deleted, merge_leaves, part_name, path_name, paths_of

# A nested structure of arrays with None in some places. Its structure is the model's, so that no type describes it.
Tree = Any


class ElementwiseTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation with the promise of `elementwise`."""

    __slots__ = ()


def elementwise(transformation: optax.GradientTransformation) -> ElementwiseTransformation:
    """Declare that an update computes every element only from the same element of gradient, state and parameter.

    It may also read scalars (a count, a learning rate, the loss). It must not use norms, means, sums over rows, matrix
    products, or random numbers drawn for a whole array. With `offload_optimizer` of `make_train_step` a declared
    optimizer is updated slice by slice; for any other one whole arrays are copied to the device. Declare the outermost
    transformation: a chain of declared ones is not declared itself.

    Args:
        transformation: its state holds scalars, and arrays that have a parameter's path and shape.

    Returns:
        The same transformation, declared.

    Example:
        >>> optimizer = jt.elementwise(optax.adamw(1e-3))
    """
    accepts_more = optax.with_extra_args_support(transformation)
    return ElementwiseTransformation(accepts_more.init, accepts_more.update)


# --- Groups. ---


class GroupsState(NamedTuple):
    """The state of each group's optimizer, and last that of the rest; None for a group without parameters."""

    inner: tuple[optax.OptState | None, ...]


def parameter_groups(
    rest: optax.GradientTransformation, groups: Mapping[str, optax.GradientTransformation]
) -> optax.GradientTransformationExtraArgs:
    """Update parameters by different optimizers, chosen by the paths of the parameters.

    `optimizer.groups` of a config does the same with the optimizers of the config.

    Args:
        rest: any optax transformation, which updates the parameters that no pattern matches.
        groups: pattern of paths, such as `head/*` (`*` stands for any text, slashes included) -> any optax
            transformation. The first pattern that matches a parameter has it.

    Returns:
        A plain transformation; declared `elementwise` where all of them are. A group that is left without parameters,
        because earlier ones match them all, updates nothing.

    Raises:
        ConfigError: when a state is made, a pattern matches no trained parameter.

    Example:
        >>> optimizer = jt.parameter_groups(optax.adamw(1e-3), {"head/*": optax.sgd(1e-2)})
    """
    parts = [*groups.values(), rest]
    grouped = by_group(parts, [[pattern] for pattern in groups], key="parameter_groups")
    return elementwise(grouped) if all(isinstance(one, ElementwiseTransformation) for one in parts) else grouped


def by_group(
    parts: Sequence[optax.GradientTransformation], matches: Sequence[Sequence[str]], *, key: str
) -> optax.GradientTransformationExtraArgs:
    """Update each parameter by the part whose patterns match its path first, or by the last part.

    A group's optimizer sees the tree of all parameters with None in the place of those of other groups. Which group has
    a parameter follows from its path alone, so that an update may also be given a part of the tree. `key` is what holds
    the patterns, with `{}` for the number of the entry, in the message of a wrong one.
    """
    each = [optax.with_extra_args_support(part) for part in parts]

    def select(tree: Tree, number: int) -> Tree:
        def one(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array | None:
            return leaf if group_number(path_name(path), matches) == number else None

        return jax.tree_util.tree_map_with_path(one, tree)

    def init(params: Tree) -> GroupsState:
        check_groups(key, matches, list(paths_of(params)))
        own = [select(params, number) for number in range(len(each))]
        return GroupsState(
            tuple(part.init(tree) if jax.tree.leaves(tree) else None for part, tree in zip(each, own, strict=True))
        )

    def update(updates: Tree, state: GroupsState, params: Tree = None, **extra: object) -> tuple[Tree, GroupsState]:
        states = []
        found = jax.tree.map(lambda _: None, updates)
        for number, (part, old) in enumerate(zip(each, state.inner, strict=True)):
            own = select(updates, number)
            if old is None and not jax.tree.leaves(own):
                states.append(None)
                continue
            moved, new = part.update(own, cast(Any, old), select(params, number), **extra)
            found = merge_leaves(found, moved)
            states.append(new)
        return found, GroupsState(tuple(states))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


# --- Lookahead (Zhang et al. 2019). ---


class LookaheadState(NamedTuple):
    """Updates since the last synchronization, the slow weights in float32, and the state of the fast weights."""

    count: jax.Array
    slow: optax.Params
    inner: optax.OptState


def lookahead(
    optimizer: optax.GradientTransformation, *, sync_period: int = 6, slow_step_size: float = 0.5
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer in Lookahead: every `sync_period` updates the parameters go back towards slow weights.

    The parameters of a train state are the fast weights, of which gradients are taken. The slow weights are optimizer
    state: they are sharded, saved and restored like a moment. After `sync_period` updates
    slow += slow_step_size * (fast - slow), and fast = slow. `TrainState.evaluation_params`, and with it evaluation,
    uses the slow weights, unless the step keeps a moving average (`ema_decay`), which has precedence.

    Args:
        optimizer: any optax transformation; its updates are those of the fast weights.
        sync_period: updates between two synchronizations, 1 or more.
        slow_step_size: how far the slow weights go, above 0 and at most 1.

    Returns:
        A plain transformation; declared `elementwise` where `optimizer` is.

    Raises:
        ConfigError: a number is out of its range.

    Example:
        >>> optimizer = jt.lookahead(optax.adamw(1e-3), sync_period=6, slow_step_size=0.5)
    """
    if sync_period < 1 or not 0 < slow_step_size <= 1:
        raise ConfigError(
            f"lookahead: sync_period={sync_period} and slow_step_size={slow_step_size}; use 1 or more, and a number "
            "above 0, at most 1"
        )
    fast = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> LookaheadState:
        # A copy: two places of a state that share one buffer could not be donated.
        return LookaheadState(jnp.int32(0), jax.tree.map(jnp.copy, params), fast.init(params))

    def update(
        updates: optax.Updates, state: LookaheadState, params: optax.Params | None = None, **extra: object
    ) -> tuple[optax.Updates, LookaheadState]:
        updates, inner = fast.update(updates, state.inner, params, **extra)
        count = (state.count + 1) % sync_period
        synchronizes = count == 0

        def move(slow: jax.Array, param: jax.Array, step: jax.Array) -> jax.Array:
            return jnp.where(synchronizes, slow + slow_step_size * (param + step - slow), slow)

        slow = jax.tree.map(move, state.slow, params, updates)
        updates = jax.tree.map(
            lambda step, new, param: jnp.where(synchronizes, new - param, step), updates, slow, params
        )
        return updates, LookaheadState(count, slow, inner)

    made = optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
    return elementwise(made) if isinstance(optimizer, ElementwiseTransformation) else made


# --- Weights that an optimizer keeps for evaluation: Lookahead's slow ones, the average of schedule-free methods. ---

# The kind of state, and the field with a tree like the parameters.
_KEEPERS = {LookaheadState: "slow", optax.contrib.ScheduleFreeState: "z"}


def evaluation_weights(optimizer_state: Any, params: Any) -> Any:
    """The parameters with the weights in place that their optimizer keeps for evaluation.

    A tree like `params`, frozen ones included, in its dtypes and shardings; `params` itself where no such weights are
    kept. An optimizer that keeps them may be anywhere inside the state (in a chain, or in one part of a partition).
    """
    # Arrays that a step took over are refused where they are used, in words of that place.
    keepers = _keepers(optimizer_state)
    if not keepers or first_deleted((optimizer_state, params)) is not None:
        return params
    trees = [(node, paths_of(getattr(node, _KEEPERS[type(node)]))) for _, node in keepers]
    kept = {path: (node, leaf) for node, tree in trees for path, leaf in tree.items()}

    def one(path: tuple[Any, ...], param: jax.Array) -> jax.Array:
        if path_name(path) not in kept:
            return param
        node, leaf = kept[path_name(path)]
        # State may be kept on the host, or sharded over further axes.
        leaf = leaf if isinstance(leaf, Tracer) else jax.device_put(leaf, param.sharding)
        if isinstance(node, optax.contrib.ScheduleFreeState):
            # The formula of optax.contrib.schedule_free_eval_params, which takes whole states.
            leaf = (param - (1 - node.b1) * leaf) / node.b1
        return leaf.astype(param.dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def kept_nodes(optimizer_state: Any) -> list[list[str]]:
    """Where an optimizer keeps weights for evaluation: stored name (`optimizer_state.1`) and field of each node."""
    return [
        [".".join(["optimizer_state", *map(part_name, path)]), _KEEPERS[type(node)]]
        for path, node in _keepers(optimizer_state)
    ]


def _keepers(optimizer_state: Any) -> list[tuple[Any, Any]]:
    kinds = tuple(_KEEPERS)
    nodes = jax.tree_util.tree_leaves_with_path(optimizer_state, is_leaf=lambda node: isinstance(node, kinds))
    return [(path, node) for path, node in nodes if isinstance(node, kinds)]
