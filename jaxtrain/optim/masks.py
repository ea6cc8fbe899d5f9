"""Which parameters decay and which are trained: predicates over paths and shapes."""

import fnmatch
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import AxesTable
from jaxtrain.layout.sharding import path_name
from jaxtrain.layout.state_entries import counting_dims


def decay_mask(axes: AxesTable, *, stack: str | None = None) -> Callable[[Any], Any]:
    """params -> tree of bool: True for matrices and kernels, False for biases and norm scales.

    A parameter decays when it has two dims or more besides those that count layers and experts; attention biases
    [heads, head_dim] do not decay although they have two.

    Args:
        axes: the model's table.
        stack: top-level path of the parameters that are stacked layer by layer, for those without a row.
    """

    def mask(params: Any) -> Any:
        def decays(path: tuple[Any, ...], leaf: Any) -> bool:
            name = path_name(path)
            dims = leaf.ndim - len(counting_dims(name, leaf.shape, axes, stack=stack))
            return dims >= 2 and name.rsplit("/", 1)[-1] not in ("bias", "scale")

        return jax.tree_util.tree_map_with_path(decays, params)

    return mask


def check_patterns(key: str, patterns: tuple[str, ...], paths: list[str]) -> None:
    """Raise where a pattern of a config's key matches no parameter.

    Raises:
        ConfigError: names the pattern and some parameters.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            some = ", ".join(paths[:6]) + (", ..." if len(paths) > 6 else "")
            raise ConfigError(f"{key}: {pattern!r} matches no parameter; there are {some}")


def trainable_predicate(freeze: tuple[str, ...], paths: list[str]) -> Callable[[str], bool] | None:
    """path -> whether it is trained; None when nothing is frozen.

    Args:
        freeze: patterns such as `embedding` or `blocks/attention/*`.
        paths: all parameter paths, to check the patterns against.

    Raises:
        ConfigError: a pattern that matches no parameter, or patterns that match all of them.
    """
    if not freeze:
        return None
    check_patterns("optimizer.freeze", freeze, paths)

    def trainable(path: str) -> bool:
        return not any(fnmatch.fnmatchcase(path, pattern) for pattern in freeze)

    if not any(map(trainable, paths)):
        raise ConfigError("optimizer.freeze matches every parameter; leave one to train")
    return trainable
