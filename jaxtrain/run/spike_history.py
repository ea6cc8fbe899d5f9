"""Restoring a state whose checkpoint has another history of losses than the run keeps: spikes came, went or changed."""

import contextlib
import dataclasses
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import DamagedError
from jaxtrain.checkpoint.tree import is_inside
from jaxtrain.train.spikes import first_history
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep

_FIELD = "spikes"


def as_saved(target: TrainState, checkpointer: Checkpointer, *, step: int | None = None) -> TrainState:
    """A state to restore, its history of losses in the form that the checkpoint has.

    Args:
        target: shapes with shardings.
        checkpointer: holds a checkpoint.
        step: of the checkpoint; None: the newest one whose record is intact.
    """
    leaves: dict[str, tuple[tuple[int, ...], str]] = {}
    for candidate in reversed(checkpointer.steps()) if step is None else [step]:
        with contextlib.suppress(DamagedError):
            leaves = dict(checkpointer.info(candidate).leaves)
            break
    saved = {name.removeprefix(f"{_FIELD}."): leaf for name, leaf in leaves.items() if is_inside(name, _FIELD)}
    wanted = {} if target.spikes is None else vars(target.spikes)
    if saved == {name: (leaf.shape, leaf.dtype.name) for name, leaf in wanted.items()}:
        return target
    everywhere = target.step.sharding
    other: Any = {name: jax.ShapeDtypeStruct(*leaf, sharding=everywhere) for name, leaf in saved.items()}
    return dataclasses.replace(target, spikes=other)


def as_kept(state: TrainState, step: TrainStep) -> TrainState:
    """A restored state with the history of losses that the step keeps: an empty one where it had another, or none."""
    wanted = step.abstract_state.spikes
    if jax.tree.structure(state.spikes) == jax.tree.structure(wanted):
        return state
    rule = step.program.settings.spikes
    if rule is None:
        return dataclasses.replace(state, spikes=None)
    everywhere = step.state_shardings.step
    return dataclasses.replace(state, spikes=jax.jit(lambda: first_history(rule), out_shardings=everywhere)())
