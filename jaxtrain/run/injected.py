"""Numbers that `optax.inject_hyperparams` keeps in the optimizer's state: restored with it, unless the call has others.

A checkpoint records the numbers that its run's call began with. Where this call has others, those are the change that
the run goes on with; where it has the same, what the state holds may have been set during the run, and stays.
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
from jaxtrain.run.own_program import differing_parts
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
    state: TrainState, current: Mapping[str, Any], saved: Mapping[str, Any], *, report: Callable[[str], None] | None
) -> TrainState:
    """A restored state with the numbers of this call where they were changed.

    Args:
        state: restored.
        current: metadata of the run that goes on.
        saved: metadata of the checkpoint. Where it is of a version that did not record the numbers, they are taken if
            the parts from Python compute something else.
        report: receives a line on what was taken, if anything was; None: nothing is said.
    """
    numbers, held, began = current[INJECTED], _numbers(state.optimizer_state), saved.get(INJECTED, {})
    if INJECTED not in saved and differing_parts(saved, current.get("digests")):
        began = {path: np.asarray(leaf).tolist() for path, leaf in held.items() if leaf.is_fully_replicated}
    taken = _changed(began, numbers)
    if not taken:
        return state

    def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        number = taken.get(path_name(path))
        return leaf if number is None else jax.device_put(np.asarray(number, leaf.dtype), leaf.sharding)

    if report is not None:
        shown = ", ".join(_shown(path, held[path], taken[path], among=numbers) for path in taken)
        report(f"going on with a change: numbers injected into the optimizer are those of this call: {shown}")
    changed = jax.tree_util.tree_map_with_path(one, state.optimizer_state)
    return dataclasses.replace(state, optimizer_state=changed)


def check_injected(current: Mapping[str, Any], saved: Mapping[str, Any], *, run_dir: Path) -> None:
    """Refuse to go on where this call injects other numbers than the run of a checkpoint began with.

    Args:
        current, saved: metadata of this run and of the checkpoint.
        run_dir: for the message.

    Raises:
        ConfigError: names the first ones that differ.
    """
    numbers, began = current[INJECTED], saved.get(INJECTED, {})
    differ = [_shown(path, began[path], number, among=numbers) for path, number in _changed(began, numbers).items()]
    if differ:
        raise ConfigError(
            f"{run_dir} holds a run with other numbers injected into its optimizer: {', '.join(differ[:3])}; {GO_ON}"
        )


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
