"""Restoring a state whose checkpoint has it in another form: spikes came, went or changed; frozen floats were wider."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import DamagedError
from jaxtrain.checkpoint.tree import Leaves, is_inside, stored_name
from jaxtrain.models.model import Params
from jaxtrain.run.base import trained_leaves
from jaxtrain.runtime.tree_path import path_name
from jaxtrain.train.base import without_base
from jaxtrain.train.spikes import first_history
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep

_FIELD = "spikes"


def as_saved(step: TrainStep, checkpointer: Checkpointer, *, to_step: int | None = None) -> TrainState:
    """The state to restore: that of the step, with history of losses and frozen parameters as the checkpoint has them.

    Args:
        step: of the run.
        checkpointer: holds a checkpoint.
        to_step: of the checkpoint; None: the newest one whose record is intact.

    Returns:
        Shapes with shardings, without the base where checkpoints do not hold it.
    """
    target = without_base(step.abstract_state, trained_leaves(step))
    trainable = step.program.settings.trainable
    leaves: dict[str, tuple[tuple[int, ...], str]] = {}
    for candidate in reversed(checkpointer.steps()) if to_step is None else [to_step]:
        with contextlib.suppress(DamagedError):
            leaves = dict(checkpointer.info(candidate).leaves)
            break
    if trainable is not None:
        params = with_saved_floats(target.params, leaves, only=lambda path: not trainable(path))
        target = dataclasses.replace(target, params=params)
    saved = {name.removeprefix(f"{_FIELD}."): leaf for name, leaf in leaves.items() if is_inside(name, _FIELD)}
    wanted = {} if target.spikes is None else vars(target.spikes)
    if saved == {name: (leaf.shape, leaf.dtype.name) for name, leaf in wanted.items()}:
        return target
    everywhere = target.step.sharding
    other: Any = {name: jax.ShapeDtypeStruct(*leaf, sharding=everywhere) for name, leaf in saved.items()}
    return dataclasses.replace(target, spikes=other)


def as_kept(state: TrainState, step: TrainStep) -> TrainState:
    """A restored state in the form that the step keeps.

    Frozen parameters are cast, and the history of losses is an empty one where the checkpoint had another, or none.
    """
    state = dataclasses.replace(state, params=in_dtypes(state.params, step.abstract_state.params))
    wanted = step.abstract_state.spikes
    if jax.tree.structure(state.spikes) == jax.tree.structure(wanted):
        return state
    rule = step.program.settings.spikes
    if rule is None:
        return dataclasses.replace(state, spikes=None)
    everywhere = step.state_shardings.step
    return dataclasses.replace(state, spikes=jax.jit(lambda: first_history(rule), out_shardings=everywhere)())


def with_saved_floats(wanted: Params, saved: Leaves, *, only: Callable[[str], bool] = lambda path: True) -> Params:
    """Parameters as shapes, in float32 where a checkpoint has them so, and the model fewer bits.

    Such are the frozen parameters of a run of `bf16_pure` that an earlier version saved: in float32.

    Args:
        wanted: shapes with shardings, None in place of what is not wanted.
        saved: stored name -> shape and dtype, of the whole state.
        only: parameter path -> whether it may be read in float32.
    """

    def one(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = path_name(path)
        _, dtype = saved.get(stored_name(f"params/{name}"), ((), ""))
        is_narrower = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
        if dtype != "float32" or not is_narrower or not only(name):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)

    return jax.tree_util.tree_map_with_path(one, wanted)


def in_dtypes(params: Params, wanted: Params) -> Params:
    """Restored parameters, cast where they were saved in another dtype than they are wanted in.

    Args:
        params: arrays, None in place of those that a checkpoint does not hold.
        wanted: shapes with shardings of all parameters.
    """
    known: Mapping[str, Any] = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}

    def one(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
        like = known[path_name(path)]
        if leaf.dtype == like.dtype:
            return leaf
        return jax.jit(lambda leaf: leaf.astype(like.dtype), out_shardings=like.sharding)(leaf)

    return jax.tree_util.tree_map_with_path(one, params)
