"""Numbers that `optax.inject_hyperparams` keeps in the optimizer's state: restored with it, unless the call has others.

A checkpoint records the numbers that its run's call began with. Where this call has others, those are the change that
the run goes on with; where it has the same, what the state holds may have been set during the run, and stays.
Checkpoints of earlier versions record none.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jaxtrain.checkpoint.tree import is_key
from jaxtrain.errors import ConfigError
from jaxtrain.run.resume import GO_ON
from jaxtrain.runtime.tree_path import path_name
from jaxtrain.train.program import first_optimizer_state
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep

INJECTED = "injected"
"""Key of the metadata of a checkpoint."""

Numbers = Mapping[str, Any]


def injected_numbers(step: TrainStep, state: TrainState) -> Numbers:
    """The numbers that the optimizer of a step begins with, by their paths in its state, as JSON values."""
    if not _numbers(step.abstract_state.optimizer_state):
        return {}
    # They depend on no parameter, so that XLA leaves the rest of the state out.
    first = jax.jit(
        lambda params: _numbers(first_optimizer_state(step.program, params)), out_shardings=step.state_shardings.step
    )(state.params)
    return {path: np.asarray(leaf).tolist() for path, leaf in first.items()}


def with_injected(
    state: TrainState,
    current: Mapping[str, Any],
    saved: Mapping[str, Any],
    *,
    may_change: bool,
    report: Callable[[str], None] | None,
) -> tuple[TrainState, Numbers | None]:
    """A restored state with the numbers of this call where they were changed.

    Args:
        state: restored.
        current: metadata of the run that goes on.
        saved: metadata of the checkpoint. Where it does not record the numbers, as those of earlier versions, and its
            optimizer is not that of the same config, the numbers of the call are compared with those of the state.
        may_change: whether those of the call are then taken.
        report: receives a line on what was taken, or could not be told; None: nothing is said.

    Returns:
        The state, and what checkpoints record from now on: the numbers of the call; None where others stay in the
        state, of which it cannot be told whether the run began with them.
    """
    numbers, held, began = current[INJECTED], _numbers(state.optimizer_state), saved.get(INJECTED)
    if numbers is None:
        return state, None
    is_recorded = began is not None
    if began is None and INJECTED not in saved and _is_of_same_call(current, saved):
        began, is_recorded = numbers, True
    if began is None:
        began = {path: np.asarray(leaf).tolist() for path, leaf in held.items() if leaf.is_fully_replicated}
    taken = _changed(began, numbers)
    if not taken:
        return state, numbers
    shown = ", ".join(_shown(path, held[path], taken[path], among=numbers) for path in taken)
    if not is_recorded and not may_change:
        if report is not None:
            report(
                "numbers injected into the optimizer stay as the checkpoint holds them, since it does not record those "
                f"that its run began with; resume='must' takes those of this call: {shown}"
            )
        return state, None

    def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        number = taken.get(path_name(path))
        return leaf if number is None else jax.device_put(np.asarray(number, leaf.dtype), leaf.sharding)

    if report is not None:
        untold = "; the checkpoint does not record those that its run began with, so any that the run set are replaced"
        report(
            f"going on with a change: numbers injected into the optimizer are those of this call: {shown}"
            f"{'' if is_recorded else untold}"
        )
    changed = jax.tree_util.tree_map_with_path(one, state.optimizer_state)
    return dataclasses.replace(state, optimizer_state=changed), numbers


def check_injected(current: Mapping[str, Any], saved: Mapping[str, Any], *, run_dir: Path) -> None:
    """Refuse to go on where this call injects other numbers than the run of a checkpoint began with.

    Args:
        current, saved: metadata of this run and of the checkpoint.
        run_dir: for the message.

    Raises:
        ConfigError: names the first ones that differ.
    """
    numbers, began = current[INJECTED], saved.get(INJECTED) or {}
    differ = [_shown(path, began[path], number, among=numbers) for path, number in _changed(began, numbers).items()]
    if differ:
        raise ConfigError(
            f"{run_dir} holds a run with other numbers injected into its optimizer: {', '.join(differ[:3])}; {GO_ON}"
        )


def _is_of_same_call(current: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether the config makes the optimizer of both runs, by the same call: it injected the same numbers into both."""
    calls = []
    for metadata in (current, saved):
        optimizer = (metadata.get("config") or {}).get("optimizer") or {}
        is_own = (metadata.get("from_python") or {}).get("optimizer") is not None
        calls.append(None if is_own else (optimizer.get("call"), optimizer.get("arguments")))
    return calls[0] is not None and calls[0] == calls[1]


def _numbers(optimizer_state: Any) -> dict[str, Any]:
    """Path -> leaf of each number that is injected and follows no schedule."""
    kind = optax.InjectStatefulHyperparamsState
    found: dict[str, Any] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(optimizer_state, is_leaf=lambda node: isinstance(node, kind)):
        if not isinstance(node, kind):
            continue
        inside = {
            f"hyperparams/{name}": leaf
            for name, leaf in node.hyperparams.items()
            # Random keys are no numbers, and are restored.
            if name not in node.hyperparams_states and not is_key(leaf)
        }
        inside |= {f"inner_state/{name}": leaf for name, leaf in _numbers(node.inner_state).items()}
        found |= {f"{path_name(path)}/{name}".lstrip("/"): leaf for name, leaf in inside.items()}
    return found


def _changed(before: Numbers, after: Numbers) -> Numbers:
    return {path: number for path, number in after.items() if path in before and _differ(before[path], number)}


def _differ(before: Any, after: Any) -> bool:
    # Another machine may round the last bit otherwise.
    return np.shape(before) != np.shape(after) or not np.allclose(before, after, rtol=1e-6, atol=0, equal_nan=True)


def _shown(path: str, before: Any, after: Any, *, among: Numbers) -> str:
    """A number by its name where no other has it, else by its path, with what it was and is."""
    name = path.rpartition("/")[2]
    is_alone = sum(other.rpartition("/")[2] == name for other in among) == 1
    values = f"of shape {np.shape(after)}" if np.ndim(after) else f"{float(before):g} -> {float(after):g}"
    return f"{name if is_alone else path} {values}"
