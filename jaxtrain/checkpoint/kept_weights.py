"""Weights that an optimizer kept for evaluation, found in a checkpoint: no optimizer is needed.

Lookahead keeps slow weights (`.../slow/<path>`). Schedule-free methods keep z and b1, and evaluate at x of
y = (1 - b1) z + b1 x, where y are the parameters (Defazio et al. 2024, arXiv 2405.15682).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.checkpoint.checkpointer import Checkpointer
from jaxtrain.checkpoint.tree import Leaves, is_inside, part_of, shown_name, stored_name
from jaxtrain.errors import CheckpointError
from jaxtrain.runtime.tree import path_name

KEPT_WEIGHTS = "kept_weights"
"""Key of the metadata of a run's checkpoint: where its optimizer keeps weights for evaluation."""

# Field of the weights -> the numbers beside them, and the state of the optimizer inside, which may have no arrays.
_FIELDS = {
    "slow": (("count",), "inner"),
    "z": (("b1", "weight_sum", "step_count", "max_lr"), "base_optimizer_state"),
}


@dataclass(frozen=True)
class KeptWeight:
    """Where a checkpoint has what belongs to one parameter.

    Attributes:
        name: stored name of the slow weights, or of z.
        b1: stored name of the number that mixes z into the parameters; None: the weights stand as they are.
    """

    name: str
    b1: str | None = None


def find_kept_weights(leaves: Leaves, recorded: Iterable[Sequence[str]] | None) -> dict[str, KeptWeight]:
    """Find the weights that evaluation uses in place of parameters.

    Args:
        leaves: stored name -> shape and dtype, of all leaves of a checkpoint.
        recorded: the entry `KEPT_WEIGHTS` of its metadata (see `kept_nodes` of `jaxtrain.optim.evaluation`); None: it
            has none, as those without metadata, and names and shapes must tell.

    Returns:
        Stored name of a parameter (without `params.`) -> its weights; empty where the run kept a moving average, which
        has precedence, or where its optimizer keeps none.

    Raises:
        CheckpointError: nothing is stored where the record says that weights are kept.
    """
    if any(is_inside(name, "ema") for name in leaves):
        return {}
    params = {
        name.removeprefix("params").removeprefix("."): shape
        for name, (shape, _) in leaves.items()
        if is_inside(name, "params")
    }
    found: dict[str, KeptWeight] = {}
    for at, field in _nodes_by_name(leaves, params) if recorded is None else recorded:
        # A node for no parameter at all still has its numbers.
        if not any(is_inside(name, at) for name in leaves):
            raise CheckpointError(
                f"the checkpoint records weights for evaluation in {shown_name(at)}, and holds no array there; without "
                "them the parameters are not those that the run evaluated: use another step"
            )
        b1 = f"{at}.b1" if field == "z" else None
        names = {parameter: _joined(at, field, parameter) for parameter in params}
        found |= {parameter: KeptWeight(name, b1) for parameter, name in names.items() if name in leaves}
    return found


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _nodes_by_name(leaves: Leaves, params: Mapping[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    """The nodes of an optimizer's state that have all fields of one that keeps weights, and no other.

    A moment of a parameter `slow/head` ends as the slow weights of `head` do, so an end of a name says nothing.
    """
    nodes: list[tuple[str, str]] = []
    # Of nodes inside of one another the outermost counts, as in `evaluation_weights`.
    for at in sorted({at for name in leaves for at in _inside_of(name)}, key=lambda at: (at.count("."), at)):
        inside = {name.removeprefix(f"{at}."): leaf for name, leaf in leaves.items() if name.startswith(f"{at}.")}
        fields = {part_of(name) for name in inside}
        for field, (numbers, state) in _FIELDS.items():
            kept = {
                name.removeprefix(field).removeprefix("."): shape
                for name, (shape, _) in inside.items()
                if is_inside(name, field)
            }
            if (
                fields - {state} == {*numbers, field}
                and all(inside.get(name, (None, ""))[0] == () for name in numbers)
                and all(params.get(parameter) == shape for parameter, shape in kept.items())
                and not any(is_inside(at, outer) for outer, _ in nodes)
            ):
                nodes.append((at, field))
    return nodes


def _inside_of(name: str) -> list[str]:
    """The nodes above a number by whose name those that keep weights can be known; empty for other leaves."""
    above, _, last = name.rpartition(".")
    return [above] if last in ("count", "b1") and is_inside(above, "optimizer_state") else []


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
    info = checkpointer.info(step)
    leaves, found = info.leaves, find_kept_weights(info.leaves, info.metadata.get(KEPT_WEIGHTS))
    # Names of parameters may hold `/` themselves, and `params` may have paths in place of trees.
    kept = {stored_name(parameter): weight for parameter, weight in found.items()}
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
