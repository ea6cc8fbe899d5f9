"""The training loop: dispatch step k + 1, then read what step k gave, so that the device never waits for the host."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxtrain.errors import DivergedError, PreemptedError
from jaxtrain.train.state import TrainState
from jaxtrain.train.update import Metrics


@dataclass(frozen=True)
class Pending:
    """A step that was dispatched and not yet read."""

    number: int
    metrics: Mapping[str, jax.Array]
    waited: float


@dataclass(frozen=True)
class Hooks:
    """What happens around the steps; each is a plain function.

    Attributes:
        before_step: (number of the step that comes), before its batch is taken.
        finished: (number, metrics on the device, seconds, data wait), once a step is known to be done -> seconds of the
            call that are counted elsewhere and not as the time of the next step; None: it has none.
        wants_pause: number -> whether `pause` is to run after this step (evaluation, a save).
        pause: (number, state) -> whether to stop after this step, with nothing in flight.
        stop_requested: number -> whether to stop after this step; asked after every step.
        data_failed: (number of the last step, state after it, error), before the error of the batch that comes next is
            raised: a `DataError`, or whatever a dataset of the user's raises; not called before the first step.
    """

    before_step: Callable[[int], None]
    finished: Callable[[int, Mapping[str, jax.Array], float, float], float | None]
    wants_pause: Callable[[int], bool]
    pause: Callable[[int, TrainState], bool]
    stop_requested: Callable[[int], bool]
    data_failed: Callable[[int, TrainState, Exception], None] = lambda number, state, error: None


def train_loop(
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]],
    state: TrainState,
    batches: Iterator[Any],
    *,
    first: int,
    last: int,
    max_skipped_in_a_row: int,
    hooks: Hooks,
) -> tuple[TrainState, int]:
    """Run steps `first` to `last` (counted from 1).

    Args:
        step: a compiled `TrainStep`, or what calls one.
        state: after step `first - 1`; donated.
        batches: batches on the mesh; the seconds that each is waited for are reported as the step's data wait.
        first, last: step numbers.
        max_skipped_in_a_row: non-finite steps and spikes after which training is given up.
        hooks: what happens around the steps.

    Returns:
        The state and the number of the last step that ran (below `last` when a stop was requested).

    Raises:
        DivergedError: too many non-finite steps or spikes in a row; the state before them is intact.
        DataError: a batch could not be given.
        Exception: what a dataset of the user's raised.
    """
    pending: Pending | None = None
    clock = time.perf_counter()

    def settle(next_wait: float = 0.0) -> None:
        """Wait for the pending step and report it; `next_wait` seconds since the step before were the next one's."""
        nonlocal pending, clock
        if pending is None:
            return
        done, pending = pending, None
        in_a_row = int(done.metrics["skipped_in_a_row"])
        now = time.perf_counter()
        seconds = now - clock - next_wait + done.waited
        clock = now + (hooks.finished(done.number, done.metrics, seconds, done.waited) or 0.0)
        if in_a_row >= max_skipped_in_a_row:
            raise DivergedError(_given_up(in_a_row, done))

    for number in range(first, last + 1):
        hooks.before_step(number)
        asked = time.perf_counter()
        try:
            batch = next(batches)
        except PreemptedError:
            raise
        except Exception as error:
            settle()
            if number > first:
                hooks.data_failed(number - 1, state, error)
            raise
        received = time.perf_counter()
        waited = received - asked
        if pending is None:
            clock = received
        state, metrics = step(state, batch)
        settle(waited)
        pending = Pending(number, metrics, waited)
        stop = hooks.stop_requested(number)
        if stop or number == last or hooks.wants_pause(number):
            settle()
            if stop or number == last:
                return state, number
            if hooks.pause(number, state):
                return state, number
    return state, first - 1


def _given_up(in_a_row: int, done: Pending) -> str:
    if "spiked" in done.metrics and int(done.metrics["spiked"]):
        return (
            f"loss or gradient norm were spikes (or not finite) {in_a_row} steps in a row, up to step {done.number}; "
            "parameters are as before them: lower optimizer.learning_rate, look at the data from there on, raise "
            "spikes.sigmas, or set spikes=null"
        )
    return (
        f"gradients were not finite {in_a_row} steps in a row, up to step {done.number}; parameters are as "
        "before them: lower optimizer.learning_rate, add warmup_steps, lower optimizer.clip_norm, or use "
        "precision.policy=bf16 or fp32"
    )


def is_due(number: int, every: int | None) -> bool:
    """Whether a step is a multiple of an interval; None: no step is."""
    return every is not None and number % every == 0
