"""What a program may do between the steps of a run: plain functions that see its numbers and may stop it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxtrain.errors import ConfigError
from jaxtrain.run.early_stopping import EarlyStopping

if TYPE_CHECKING:
    from jaxtrain.train.state import TrainState

Answer = Literal["stop"] | None


@dataclass(frozen=True)
class Moment:
    """A run between two steps, as a callback sees it.

    Attributes:
        step: steps done.
        metrics: of that step (`loss`, `grad_norm`, the task's own), of the evaluation (`eval_loss`, ...), or empty
            after a save; numbers, a vector as `name_0`, `name_1`. Equal on every process.
        state: the state after that step, on the mesh. Read it, but do not keep it: the next step takes its memory over.
        run_dir: directory of the run.

    Example:
        >>> seen = jt.Callback(on_step=lambda moment: print(moment.step, moment.metrics["loss"]), every=100)
        >>> norms = jt.Callback(on_step=lambda moment: moment.log({"gradients": moment.gradients()}), every=100)
    """

    step: int
    metrics: Mapping[str, float | int]
    state: "TrainState"
    run_dir: Path
    _log: Callable[[int, Mapping[str, Any]], None] = field(repr=False, default=lambda step, values: None)
    _gradients: Callable[[], Any] | None = field(repr=False, default=None)

    def log(self, values: Mapping[str, Any]) -> None:
        """Write numbers, histograms and images to metrics.jsonl, TensorBoard, the trackers and the report.

        Every process calls it.

        Args:
            values: name -> a number; an array of one dim, of which the histogram is logged, or the pair (counts, edges)
                of `np.histogram`; an image [H, W], [H, W, 1] or [H, W, 3], uint8 or scaled to its range, at most 512
                pixels high and wide; or a nested dict of arrays, such as gradients, with a histogram for each.

        Raises:
            ConfigError: a value is none of these, or has the name of a metric of the run.
        """
        known = {"step", *self.metrics}
        taken = next((name for name in values if name in known or name.startswith("eval_")), None)
        if taken is not None:
            raise ConfigError(f"moment.log: {taken!r} is a metric of the run; use another name")
        self._log(self.step, values)

    def gradients(self) -> Any:
        """The mean gradients of the batch of this step at the state after it; every process calls it.

        Returns:
            A tree like the parameters, float32, None in place of frozen ones; see `TrainStep.gradients`.

        Raises:
            ConfigError: called in `on_evaluation` or `on_save`, which have no batch.
        """
        if self._gradients is None:
            raise ConfigError("moment.gradients() needs the batch of a step; call it in on_step")
        return self._gradients()


@dataclass(frozen=True)
class Callback:
    """Functions that a run calls between its steps; each gets a `Moment`, and stops the run by returning "stop".

    They are called on every process, in the order in which the callbacks were given. Where processes would answer
    differently, process 0 decides. A run that a callback stopped is evaluated, saved and closed like one that is done,
    and the same call goes on with it. An exception in a callback ends the run with that exception; where the run has
    one process, the state is saved first.

    Attributes:
        on_step: called after every `every` steps and after the last one. No step is under way meanwhile, so a device
            waits: for steps of milliseconds, raise `every`.
        on_evaluation: called after each evaluation.
        on_save: called once a checkpoint is complete.
        every: steps between two calls of `on_step`.

    Raises:
        ConfigError: none of the functions is given, or `every` is below 1.

    Example:
        >>> def enough(moment):
        ...     return "stop" if moment.metrics["eval_accuracy"] > 0.99 else None
        >>> callback = jt.Callback(on_evaluation=enough)
    """

    on_step: Callable[[Moment], Answer] | None = None
    on_evaluation: Callable[[Moment], Answer] | None = None
    on_save: Callable[[Moment], Answer] | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if self.on_step is self.on_evaluation is self.on_save is None:
            raise ConfigError("Callback has nothing to call; give on_step=, on_evaluation= or on_save=")
        if self.every < 1:
            raise ConfigError(f"every={self.every!r} of a Callback; use a whole number of steps from 1")


def sorted_callbacks(given: Any) -> tuple[tuple[Callback, ...], EarlyStopping | None]:
    """The callbacks of a run, and the early stopping among them, which is a setting of the run.

    Args:
        given: what a program passed as `callbacks`; one alone is taken too.

    Raises:
        ConfigError: something else is among them, or more than one early stopping.
    """
    listed = [given] if isinstance(given, (Callback, EarlyStopping)) else list(given)
    if any(not isinstance(one, (Callback, EarlyStopping)) for one in listed):
        raise ConfigError(
            f"callbacks={given!r}; write callbacks=[jaxtrain.Callback(on_step=...), jaxtrain.EarlyStopping(...)]"
        )
    stopping = [one for one in listed if isinstance(one, EarlyStopping)]
    if len(stopping) > 1:
        raise ConfigError(f"callbacks holds {len(stopping)} EarlyStopping; a run has one: leave the others out")
    return tuple(one for one in listed if isinstance(one, Callback)), next(iter(stopping), None)


def check_answer(answer: Any, name: str) -> None:
    """Raise where a callback returned something other than None or "stop"."""
    if answer is not None and not (isinstance(answer, str) and answer == "stop"):
        raise ConfigError(f'{name} of a callback returned {answer!r}; return "stop" to stop the run, or nothing')
