"""The learning rate of an optax optimizer, for the metrics: optax keeps it in closures, or in the state."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Transformations of optax around one other, which change no factor of its updates.
_WRAPPERS = ("apply_if_finite",)
# After any other `scale_by_...`, what gradients were multiplied by before has no effect on the update.
_KEEP_SIZES = ("scale_by_schedule", "scale_by_learning_rate", "scale_by_param_block_rms", "scale_by_param_block_norm")
# They multiply by what a state says.
_UNKNOWN = ("reduce_on_plateau", "scale_by_rprop", "stateless")


def injected(count: Any) -> Any:
    """Stands for the rate in the state of `optax.inject_hyperparams`, which `rate_in` reads."""
    raise NotImplementedError


def rate_of(optimizer: optax.GradientTransformation) -> optax.Schedule | None:
    """The schedule of an optimizer: what its updates are multiplied by; None where that is not known, or is 1.

    Args:
        optimizer: made with a number or a schedule; chains and wrappers are looked into, parts with masks are not.
    """
    factors = _factors(optimizer.update)
    if not factors or injected in factors:
        return injected if factors == [injected] else None
    if not any(map(callable, factors)) and abs(np.prod(factors)) == 1:
        return None  # the sign of an optimizer that has its rate elsewhere

    def rate(count: Any) -> Any:
        product: Any = 1.0
        for factor in factors:
            product = product * (factor(count) if callable(factor) else factor)
        return jnp.abs(product)

    return rate


def rate_in(optimizer_state: Any) -> Any:
    """The rate that the state of `optax.inject_hyperparams` holds; None where it has none."""
    kind = optax.InjectStatefulHyperparamsState
    nodes = jax.tree.leaves(optimizer_state, is_leaf=lambda x: isinstance(x, kind))
    return next((node.hyperparams.get("learning_rate") for node in nodes if isinstance(node, kind)), None)


def _factors(update: Any) -> list[Any] | None:
    """The numbers and schedules that the updates of a transformation are multiplied by; None: not known."""
    name, cells = _name(update), inspect.getclosurevars(update).nonlocals if inspect.isfunction(update) else {}
    if name == "scale":
        return [cells["step_size"]] if np.ndim(cells["step_size"]) == 0 else None
    if name == "scale_by_schedule":
        return [cells["step_size_fn"]]
    if name.startswith("inject_"):
        return [injected]
    inner = list(_updates(cells))
    if name == "chain":
        found: list[Any] | None = []
        for part in _parts(inner):
            is_anew = _name(part).startswith("scale_by_") and _name(part) not in (*_KEEP_SIZES, *_UNKNOWN)
            more = _factors(part)
            found = [] if is_anew else None if found is None or more is None else found + more
        return found
    if name in _WRAPPERS and len(inner) == 1:
        return _factors(inner[0])
    is_known = (getattr(update, "__module__", None) or "").startswith("optax.") and name not in _UNKNOWN
    return [] if is_known and not any(_factors(one) for one in inner) else None


def _parts(updates: Iterable[Any]) -> Iterator[Any]:
    """The updates in chains of chains, in order."""
    for update in updates:
        is_chain = _name(update) == "chain" and inspect.isfunction(update)
        yield from _parts(_updates(inspect.getclosurevars(update).nonlocals)) if is_chain else (update,)


def _name(update: Any) -> str:
    """The function of optax that made an update."""
    return getattr(update, "__qualname__", "").partition(".")[0]


def _updates(value: Any) -> Iterator[Any]:
    """The updates of the transformations in a value."""
    if isinstance(value, optax.GradientTransformation):
        yield value.update
    elif isinstance(value, Mapping | tuple | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _updates(one)
    elif _name(value) == "with_extra_args_support":
        yield from _updates(inspect.getclosurevars(value).nonlocals)
    elif inspect.isfunction(value) and "update" in value.__name__:
        yield value
