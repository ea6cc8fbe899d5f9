"""Weights that an optimizer kept for evaluation, found in a checkpoint by their names: no optimizer is needed.

Lookahead keeps slow weights (`.../slow/<path>`). Schedule-free methods keep z and b1, and evaluate at x of
y = (1 - b1) z + b1 x, where y are the parameters (Defazio et al. 2024, arXiv 2405.15682).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.checkpoint.checkpointer import Checkpointer
from jaxtrain.checkpoint.tree import stored_name
from jaxtrain.runtime.tree_path import path_name

_OPTIMIZER = "optimizer_state."


@dataclass(frozen=True)
class KeptWeight:
    """Where a checkpoint has what belongs to one parameter.

    Attributes:
        name: stored name of the slow weights, or of z.
        b1: stored name of the number that mixes z into the parameters; None: the weights stand as they are.
    """

    name: str
    b1: str | None = None


def find_kept_weights(names: Iterable[str]) -> dict[str, KeptWeight]:
    """Find the weights that evaluation uses in place of parameters.

    Args:
        names: stored names of the leaves of a checkpoint.

    Returns:
        Stored name of a parameter (without `params.`) -> its weights; empty where the run kept a moving average, which
        has precedence, or where its optimizer keeps none.
    """
    known = set(names)
    if any(name.startswith("ema.") for name in known):
        return {}
    found: dict[str, KeptWeight] = {}
    for parameter in (name.removeprefix("params.") for name in known if name.startswith("params.")):
        for name in known:
            if not name.startswith(_OPTIMIZER):
                continue
            if name.endswith(f".slow.{parameter}"):
                found[parameter] = KeptWeight(name)
            b1 = f"{name.removesuffix(f'z.{parameter}')}b1"
            if name.endswith(f".z.{parameter}") and b1 in known:
                found[parameter] = KeptWeight(name, b1)
    return found


def read_kept_weights(checkpointer: Checkpointer, params: Any, *, step: int) -> Any:
    """Put the weights that evaluation uses in the place of the parameters of a step.

    Args:
        checkpointer: of the run.
        params: the parameters of that step, as they are stored: sharded jax arrays, or None in place of one.
        step: number of the step.

    Returns:
        A tree like `params`, in its dtypes and shardings; `params` itself where no such weights were kept.

    Raises:
        DamagedError: an array differs from what was saved.
    """
    leaves = checkpointer.info(step).leaves
    kept = find_kept_weights(leaves)
    if not kept:
        return params

    def like(name: str, sharding: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = leaves[name]
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    wanted: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        weight = kept.get(stored_name(path_name(path)))
        if weight is not None:
            wanted[weight.name] = like(weight.name, leaf.sharding)
            if weight.b1 is not None:
                wanted[weight.b1] = like(weight.b1, NamedSharding(leaf.sharding.mesh, PartitionSpec()))
    read = checkpointer.read(wanted, step=step)

    def one(path: Any, leaf: jax.Array) -> jax.Array:
        weight = kept.get(stored_name(path_name(path)))
        if weight is None:
            return leaf
        found = read[weight.name]
        if weight.b1 is not None:
            b1 = read[weight.b1]
            found = (leaf - (1 - b1) * found) / b1
        return found.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, params)
