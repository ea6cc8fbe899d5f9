"""Groups of parameters, each with an optimizer of its own, by the paths of the parameters.

A group's optimizer sees the tree of all parameters with None in the place of those of other groups. Which group has a
parameter follows from its path alone, so that an update may also be given a part of the tree (`optim/offload.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import optax

from jaxtrain.config.arguments import refusal
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import path_name
from jaxtrain.optim.elementwise import ElementwiseTransformation, elementwise
from jaxtrain.optim.rules import check_groups, group_number

# A nested structure of arrays with None in some places. Its structure is the model's, so that no type describes it.
Tree = Any


class GroupsState(NamedTuple):
    """State of `parameter_groups`.

    Attributes:
        inner: the state of each group's optimizer, in order, and last that of the rest; None for a group without
            parameters, which not every transformation takes.
    """

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
        ConfigError: `rest` or a value of `groups` is no optax transformation; there are no groups; or, when a state is
            made, a pattern matches no trained parameter.

    Example:
        >>> optimizer = jt.parameter_groups(optax.adamw(1e-3), {"head/*": optax.sgd(1e-2)})
    """
    write = "parameter_groups(optax.adamw(1e-3), {'head/*': optax.sgd(1e-2)})"
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(one, str) for one in groups):
        wanted = "a dict from path patterns to optax transformations"
        raise ConfigError(refusal("parameter_groups: groups", wanted, groups, write))
    for what, one in (("rest", rest), *((f"groups[{pattern!r}]", one) for pattern, one in groups.items())):
        if not isinstance(one, optax.GradientTransformation):
            raise ConfigError(refusal(f"parameter_groups: {what}", "an optax transformation", one, write))
    parts = [*groups.values(), rest]
    grouped = by_group(parts, [[pattern] for pattern in groups], key="parameter_groups")
    return elementwise(grouped) if all(isinstance(one, ElementwiseTransformation) for one in parts) else grouped


def by_group(
    parts: Sequence[optax.GradientTransformation], matches: Sequence[Sequence[str]], *, key: str
) -> optax.GradientTransformationExtraArgs:
    """Update each parameter by the part whose patterns match its path first, or by the last part.

    Args:
        parts: one for each entry of `matches`, and one more for what none of them matches.
        matches: patterns of paths.
        key: what holds the patterns, with `{}` for the number of the entry, for the message of a wrong one.
    """
    each = [optax.with_extra_args_support(part) for part in parts]

    def select(tree: Tree, number: int) -> Tree:
        """The tree with None in the place of the parameters of other groups."""

        def one(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array | None:
            return leaf if group_number(path_name(path), matches) == number else None

        return jax.tree_util.tree_map_with_path(one, tree)

    def init(params: Tree) -> GroupsState:
        check_groups(key, matches, [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)])
        own = [select(params, number) for number in range(len(each))]
        return GroupsState(
            tuple(part.init(tree) if jax.tree.leaves(tree) else None for part, tree in zip(each, own, strict=True))
        )

    # As any wrapper of optax, it hands on whatever the step gives to those that it wraps.
    def update(updates: Tree, state: GroupsState, params: Tree = None, **extra: object) -> tuple[Tree, GroupsState]:
        states = []
        found = jax.tree.map(lambda _: None, updates)
        for number, (part, old) in enumerate(zip(each, state.inner, strict=True)):
            own = select(updates, number)
            if old is None and not jax.tree.leaves(own):
                states.append(None)
                continue
            moved, new = part.update(own, cast(Any, old), select(params, number), **extra)
            found = jax.tree.map(lambda a, b: b if a is None else a, found, moved, is_leaf=lambda leaf: leaf is None)
            states.append(new)
        return found, GroupsState(tuple(states))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
