"""Optimizers around optimizers: groups of parameters, biases of routers, and the promise `elementwise`.

As any wrapper of optax, each hands on whatever the step gives to those that it wraps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim.rules import check_groups, group_number
from jaxtrain.runtime.tree import merge_leaves, path_name, paths_of

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


def balance_experts(optimizer: optax.GradientTransformation, step: float) -> optax.GradientTransformation:
    """Let an optimizer move each router's `score_bias` against the load of its expert: by `step`, down or up.

    Its gradient has the sign of the load less the mean (`ops.experts.compute.level_load`).

    Source: Wang et al. 2024 (auxiliary-loss-free load balancing, algorithm 1); DeepSeek-AI 2024, section 2.1.2.
    """
    inner = optax.with_extra_args_support(optimizer)

    def update(updates: Tree, state: Any, params: Tree = None, **extra: object) -> tuple[Tree, Any]:
        moved, state = inner.update(updates, state, params, **extra)

        def one(path: jax.tree_util.KeyPath, gradient: jax.Array, move: jax.Array) -> jax.Array:
            if not path_name(path).endswith("/score_bias"):
                return move
            # A load that is the mean in sums over microbatches but for rounding is no reason to move.
            size = jnp.abs(gradient)
            return jnp.where(size > 1e-5 * jnp.max(size), -step * jnp.sign(gradient), 0.0)

        return jax.tree_util.tree_map_with_path(one, updates, moved), state

    balanced = optax.GradientTransformationExtraArgs(inner.init, update)  # pyright: ignore[reportArgumentType]
    return elementwise(balanced) if isinstance(optimizer, ElementwiseTransformation) else balanced


# --- Groups. ---


class GroupsState(NamedTuple):
    """The state of each group's optimizer, and last that of the rest; None for a group without parameters."""

    inner: tuple[optax.OptState | None, ...]


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
