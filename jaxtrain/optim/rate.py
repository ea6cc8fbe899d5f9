"""The learning rate of an optax optimizer, for the metrics: optax keeps it in closures, or in the state."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import ReduceLROnPlateauState

_CHAINS = ("chain", "named_chain")
# After any other `scale_by_...`, what gradients were multiplied by before has no effect on the update.
_KEEP_SIZES = ("scale_by_schedule", "scale_by_learning_rate", "scale_by_param_block_rms", "scale_by_param_block_norm")


def rate_of(optimizer: optax.GradientTransformation) -> optax.Schedule | None:
    """The schedule of an optimizer: what its updates are multiplied by; None where none or several are found.

    Args:
        optimizer: made with a number or a schedule, in chains and wrappers of any depth.
    """
    factors = _factors(optimizer.update)
    if not factors:
        return None

    def rate(count: Any) -> Any:
        product: Any = 1.0
        for factor in factors:
            product = product * (factor(count) if callable(factor) else factor)
        return jnp.abs(product)

    return rate


def rate_in(optimizer_state: Any, rate: Any) -> Any:
    """The rate with what the state says: that of `optax.inject_hyperparams`, times the scale of a plateau.

    Args:
        optimizer_state: after the update.
        rate: of the schedule; None: there is none.
    """
    kinds = (optax.InjectStatefulHyperparamsState, ReduceLROnPlateauState)
    nodes = [node for node in jax.tree.leaves(optimizer_state, is_leaf=lambda x: isinstance(x, kinds))]
    injected = [node.hyperparams.get("learning_rate") for node in nodes if isinstance(node, kinds[0])]
    if injected:
        rate = injected[0] if len(injected) == 1 else None
    for node in nodes:
        if isinstance(node, ReduceLROnPlateauState) and rate is not None:
            rate = rate * node.scale
    return rate


def _factors(update: Any) -> list[Any]:
    """The numbers and schedules that the updates of a transformation are multiplied by."""
    name, cells = _name(update), _cells(update)
    if name == "scale" and "step_size" in cells:
        return [cells["step_size"]] if np.ndim(cells["step_size"]) == 0 else []
    if name == "scale_by_schedule" and "step_size_fn" in cells:
        schedule = cells["step_size_fn"]
        return [_cells(schedule).get("learning_rate", schedule)]  # without the sign, so that equal ones are equal
    if name in _CHAINS:
        found: list[Any] = []
        for part in _parts(update):
            is_anew = _name(part).startswith("scale_by_") and _name(part) not in _KEEP_SIZES
            found = [] if is_anew else found + _factors(part)
        return found
    # The parts of a partition count as one where they have one rate.
    each = [factors for part in _functions(cells) if (factors := _factors(part))]
    return each[0] if each and all(one == each[0] for one in each) else []


def _parts(chain: Any) -> Iterator[Any]:
    for part in _functions(_cells(chain)):
        yield from _parts(part) if _name(part) in _CHAINS else (part,)


def _name(update: Any) -> str:
    """The function of optax that made an update."""
    return getattr(update, "__qualname__", "").partition(".")[0]


def _cells(function: Any) -> dict[str, Any]:
    """The variables that a function closes over."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = zip(names, getattr(function, "__closure__", None) or (), strict=False)
    return {name: cell.cell_contents for name, cell in cells if cell != type(cell)()}


def _functions(value: Any) -> Iterator[Any]:
    """The updates of the transformations in a value."""
    if isinstance(value, optax.GradientTransformation):
        yield value.update
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _functions(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _functions(one)
    elif _name(value) == "with_extra_args_support":
        yield from _functions(_cells(value))
    elif callable(value) and getattr(value, "__closure__", None) and "update" in getattr(value, "__name__", ""):
        yield value
