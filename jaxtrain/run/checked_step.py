"""The step of a run with the comparisons of the group `checks`: replays, and copies of replicated arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config.schema import ChecksConfig
from jaxtrain.models.task import Batch
from jaxtrain.run.replicas import DeviceDigests
from jaxtrain.run.saving import is_due
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep
from jaxtrain.train.update import Metrics

StepFunction = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


def checked_step(step: TrainStep, checks: ChecksConfig | None, *, start: int) -> StepFunction:
    """The step itself where nothing is checked, else a function that also compares.

    Args:
        step: compiled.
        checks: when what is compared; None: nothing is.
        start: steps done before the first call.
    """
    if checks is None or (checks.replay_every is None and checks.replicas_every is None):
        return step
    return CheckedStep(step, checks, start=start)


class CheckedStep:
    """A step that is compared with itself, or whose copies are compared, at multiples of some numbers.

    A replay needs memory for a second state during that step: the state is copied, the step runs on the copy, digests
    of the result are kept and the result is dropped; then the step runs on the state itself.

    Args:
        step: compiled.
        checks: when what is compared.
        start: steps done before the first call.
    """

    def __init__(self, step: TrainStep, checks: ChecksConfig, *, start: int) -> None:
        self._step, self._checks, self._number = step, checks, start
        self._digests = DeviceDigests(step.abstract_state, step.state_on_host, step.mesh)
        self._checked = 0

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step.

        Raises:
            CorruptionError: bits differ that must be equal.
        """
        self._number += 1
        if is_due(self._number, self._checks.replay_every):
            copy, _ = self._step(jax.tree.map(jnp.copy, state), batch)
            first = self._digests(copy)
            del copy
            state, metrics = self._step(state, batch)
            self._digests.check_equal(first, self._digests(state), number=self._number)
        else:
            state, metrics = self._step(state, batch)
        if is_due(self._number, self._checks.replicas_every):
            self._digests.check_copies(state, number=self._number, checked=self._checked)
            self._checked = self._number
        return state, metrics
