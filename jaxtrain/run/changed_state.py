"""Restoring a state whose checkpoint has small parts that the run does not keep, or in another form, and the reverse.

These are the history of losses (spikes came, went or changed) and the loss scale (of fp16 alone).
"""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import DamagedError
from jaxtrain.checkpoint.tree import Leaves, is_inside
from jaxtrain.precision.policy import LossScale, LossScaling
from jaxtrain.train.spikes import first_history
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep

_FIELDS = ("spikes", "loss_scale")


def saved_leaves(checkpointer: Checkpointer, *, step: int | None = None) -> Leaves:
    """Stored name -> shape and dtype, of a step, or of the newest one whose record is intact; empty without any."""
    for candidate in reversed(checkpointer.steps()) if step is None else [step]:
        with contextlib.suppress(DamagedError):
            return checkpointer.info(candidate).leaves
    return {}


def as_saved(target: TrainState, checkpointer: Checkpointer, *, step: int | None = None) -> TrainState:
    """A state to restore, its history of losses and its loss scale in the form that the checkpoint has.

    Args:
        target: shapes with shardings.
        checkpointer: holds a checkpoint.
        step: of the checkpoint; None: the newest one whose record is intact.
    """
    leaves, everywhere = saved_leaves(checkpointer, step=step), target.step.sharding
    for field in _FIELDS:
        saved = {name.removeprefix(f"{field}."): leaf for name, leaf in leaves.items() if is_inside(name, field)}
        kept = getattr(target, field)
        wanted = {} if kept is None else vars(kept)
        if saved != {name: (leaf.shape, leaf.dtype.name) for name, leaf in wanted.items()}:
            other: Any = {name: jax.ShapeDtypeStruct(*leaf, sharding=everywhere) for name, leaf in saved.items()}
            target = dataclasses.replace(target, **{field: other})
    return target


def as_kept(state: TrainState, step: TrainStep) -> TrainState:
    """A restored state with the history of losses and the loss scale that the step keeps.

    They begin anew where the checkpoint had others, or none. A scale outside of its bounds, which were changed, is
    moved to the nearest one.
    """
    wanted, settings, everywhere = step.abstract_state, step.program.settings, step.state_shardings.step
    if jax.tree.structure(state.spikes) != jax.tree.structure(wanted.spikes):
        rule = settings.spikes
        history = None if rule is None else jax.jit(lambda: first_history(rule), out_shardings=everywhere)()
        state = dataclasses.replace(state, spikes=history)
    scaling = settings.loss_scaling
    if wanted.loss_scale is None:
        return dataclasses.replace(state, loss_scale=None)
    if jax.tree.structure(state.loss_scale) != jax.tree.structure(wanted.loss_scale):
        scale = jax.jit(lambda: LossScale.create(scaling), out_shardings=everywhere)()
        return dataclasses.replace(state, loss_scale=scale)
    bounded = jax.jit(lambda scale: _within(scale, scaling), out_shardings=everywhere)
    return dataclasses.replace(state, loss_scale=bounded(state.loss_scale))


def _within(scale: LossScale, scaling: LossScaling) -> LossScale:
    return dataclasses.replace(scale, scale=jnp.clip(scale.scale, scaling.minimum, scaling.maximum))
