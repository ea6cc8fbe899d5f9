"""The learning-rate range test (Smith 2017, arXiv 1506.01186): a short run whose rate rises while its loss is read."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optax

from jaxtrain.data.batches import Batches
from jaxtrain.data.sources.given import data_of, renamed
from jaxtrain.train.make_step import make_train_step

if TYPE_CHECKING:
    from jaxtrain.models.model import Model
    from jaxtrain.models.task import Task

# The test ends where the smoothed loss is so many times its smallest value: larger rates only diverge.
_DIVERGED = 4.0
# Share of the older losses in the smoothed one.
_SMOOTHING = 0.9


@dataclass(frozen=True)
class LearningRates:
    """What `find_learning_rate` tried.

    Attributes:
        rates: float64 [steps], rising by a constant factor.
        losses: float64 [steps], smoothed.
        suggestion: a tenth of the rate with the least loss: a first value to try, not the best one.
    """

    rates: np.ndarray
    losses: np.ndarray
    suggestion: float

    def __repr__(self) -> str:
        return f"LearningRates: {self.suggestion:.1e} of {self.rates[0]:.1e} to {self.rates[-1]:.1e}"

    def plot(self, path: str | Path = "learning_rate.png") -> Path:
        """Write a picture of the losses over the rates (.png or .svg)."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.semilogx(self.rates, self.losses)
        axes.axvline(self.suggestion, linestyle="--", color="gray", label=f"{self.suggestion:.1e}")
        axes.set(xlabel="learning rate", ylabel="smoothed training loss")
        axes.legend()
        figure.savefig(path)
        return Path(path)


def find_learning_rate(
    model: "Model",
    task: "Task | str",
    optimizer: Callable[[optax.Schedule], optax.GradientTransformation] = optax.adamw,
    *,
    data: Any,
    columns: Mapping[str, str] | None = None,
    batch_size: int = 32,
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = 100,
    seed: int = 0,
    **options: Any,
) -> LearningRates:
    """Train for some steps while the learning rate rises, and suggest one from where the loss was least.

    Nothing is written, and the parameters that were trained are dropped.

    Args:
        model, task: as for `fit`.
        optimizer: learning rate -> optimizer, such as `optax.adamw` or `lambda rate: optax.sgd(rate, momentum=0.9)`.
        data, columns: rows with an index, as for `fit`.
        batch_size: rows per step.
        lowest, highest: first and last rate, above 0.
        steps: number of rates, 10 or more; fewer are tried where the loss grows beyond four times its smallest value.
        seed: of the parameters and the order of the rows.
        options: of `make_train_step`: mesh, policy, clip_norm.

    Example:
        >>> found = jt.find_learning_rate(model, "classification", data=rows, batch_size=8, steps=20)
        >>> found.plot("rates.png").name
        'rates.png'
    """
    rows: Any = data_of(data if columns is None else renamed(data, columns, "data")).train
    rates = np.geomspace(lowest, highest, steps)
    schedule = optax.exponential_decay(lowest, 1, float(rates[1] / rates[0]))
    step = make_train_step(model, task, optimizer(schedule), **options)
    load = step.loader(Batches(rows, batch_size, seed=seed, shuffle=True))
    state, losses, smoothed = step.init(seed), [], 0.0
    for k in range(steps):
        state, metrics = step(state, load(k))
        smoothed = _SMOOTHING * smoothed + (1 - _SMOOTHING) * float(metrics["loss"])
        losses.append(smoothed / (1 - _SMOOTHING ** (k + 1)))
        if not math.isfinite(losses[-1]) or (k > steps // 10 and losses[-1] > _DIVERGED * min(losses)):
            break
    found = np.array(losses)
    # The first losses are those of few batches.
    first = min(steps // 10, len(found) - 1)
    return LearningRates(rates[: len(found)], found, float(rates[first + int(np.nanargmin(found[first:]))]) / 10)
