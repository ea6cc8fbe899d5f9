"""Which parameters are decayed and which are trained, as predicates over paths and shapes."""

import fnmatch
from collections.abc import Callable

import jax
import optax

from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import AxesTable
from jaxtrain.layout.sharding import path_name
from jaxtrain.layout.state_entries import counting_dims
from jaxtrain.optim.rules import VECTORS, check_patterns


def decay_mask(axes: AxesTable) -> Callable[[optax.Params], optax.Params]:
    """Make the mask of weight decay: params -> tree of bool, True for matrices and kernels.

    A parameter is decayed where it has two dims or more besides those that count layers and experts. Parameters named
    `bias` or `scale` are not decayed, even where they have two, as attention biases [heads, head_dim] do.

    Args:
        axes: row of each parameter (`complete_axes`).
    """

    def mask(params: optax.Params) -> optax.Params:
        def decays(path: jax.tree_util.KeyPath, leaf: jax.Array) -> bool:
            name = path_name(path)
            dims = leaf.ndim - len(counting_dims(name, leaf.shape, axes))
            return dims >= 2 and name.rsplit("/", 1)[-1] not in VECTORS

        return jax.tree_util.tree_map_with_path(decays, params)

    return mask


def trainable_predicate(freeze: tuple[str, ...], paths: list[str]) -> Callable[[str], bool] | None:
    """Make the predicate that says whether the parameter at a path is trained.

    Args:
        freeze: patterns of frozen parameters, such as `embedding` or `blocks/attention/*`.
        paths: all parameter paths, against which the patterns are checked.

    Returns:
        path -> whether the parameter is trained; None where nothing is frozen.

    Raises:
        ConfigError: a pattern matches no parameter, or the patterns match all of them.
    """
    if not freeze:
        return None
    check_patterns("optimizer.freeze", freeze, paths)

    def trainable(path: str) -> bool:
        return not any(fnmatch.fnmatchcase(path, pattern) for pattern in freeze)

    if not any(map(trainable, paths)):
        raise ConfigError("optimizer.freeze matches every parameter; leave one to train")
    return trainable
