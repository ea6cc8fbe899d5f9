"""Weights that an optimizer kept for evaluation, found in a checkpoint: no optimizer is needed.

Lookahead keeps slow weights (`.../slow/<path>`). Schedule-free methods keep z and b1, and evaluate at x of
y = (1 - b1) z + b1 x, where y are the parameters (Defazio et al. 2024, arXiv 2405.15682).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.checkpoint.checkpointer import Checkpointer
from jaxtrain.checkpoint.tree import Leaves, is_inside, stored_name
from jaxtrain.runtime.tree import path_name

KEPT_WEIGHTS = "kept_weights"
"""Key of the metadata of a run's checkpoint: where its optimizer keeps weights for evaluation."""


def find_kept_weights(leaves: Leaves, recorded: Iterable[Sequence[str]]) -> dict[str, tuple[str, str | None]]:
    """Find the weights that evaluation uses in place of parameters, by what `optim.evaluation.kept_nodes` recorded.

    Returns:
        Stored name of a parameter (without `params.`) -> the stored name of its weights, and that of the number b1 that
        mixes them into the parameters, or None; empty where the run kept a moving average, which has precedence.
    """
    if any(is_inside(name, "ema") for name in leaves):
        return {}
    params = [name.removeprefix("params").removeprefix(".") for name in leaves if is_inside(name, "params")]
    found: dict[str, tuple[str, str | None]] = {}
    for at, field in recorded:
        for parameter in params:
            name = ".".join(part for part in (at, field, parameter) if part)
            if name in leaves:
                found[parameter] = (name, f"{at}.b1" if field == "z" else None)
    return found


def read_kept_weights(checkpointer: Checkpointer, params: Any, *, step: int) -> Any:
    """Put the weights that evaluation uses in the place of the parameters of a step, as they are stored.

    Returns:
        A tree like `params`, in its dtypes and shardings; `params` itself where no such weights were kept.
    """
    info = checkpointer.info(step)
    found = find_kept_weights(info.leaves, info.metadata.get(KEPT_WEIGHTS) or ())
    # Names of parameters may hold `/` themselves, and `params` may have paths in place of trees.
    kept = {stored_name(parameter): names for parameter, names in found.items()}

    def like(name: str, sharding: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = info.leaves[name]
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    wanted: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, b1 = kept.get(stored_name(path_name(path)), (None, None))
        if name is not None:
            wanted[name] = like(name, leaf.sharding)
        if b1 is not None:
            wanted[b1] = like(b1, NamedSharding(leaf.sharding.mesh, PartitionSpec()))
    if not wanted:
        return params
    read = checkpointer.read(wanted, step=step)

    def one(path: Any, leaf: jax.Array) -> jax.Array:
        name, b1 = kept.get(stored_name(path_name(path)), (None, None))
        if name is None:
            return leaf
        weights = read[name] if b1 is None else (leaf - (1 - read[b1]) * read[name]) / read[b1]
        return weights.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, params)
