"""What a page knows of a run: its files, read with patience, and what follows from them at once."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.metrics.report.curves import Gaps, Series, piece_starts, read_series
from jaxtrain.metrics.report.html import mapping, number, rounded
from jaxtrain.metrics.report.plots import Reference
from jaxtrain.metrics.runinfo import compared_after

# The baseline of a regression.
OF_MEAN = "the mean of the targets"


@dataclass(frozen=True)
class RunFiles:
    """A run as its directory describes it.

    Attributes:
        run_dir: the directory.
        name: of the run.
        info: content of `run.json`; empty where it is missing or damaged.
        series: metric -> (steps, values) of `metrics.jsonl`, of its finite values.
        gaps: metric -> steps of the rows in which it was not finite, or not known.
    """

    run_dir: Path
    name: str
    info: Mapping[str, Any]
    series: Series
    gaps: Gaps

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved config."""
        return mapping(self.info.get("config"))

    @property
    def final(self) -> Mapping[str, Any]:
        """The last metrics of a run that ended."""
        return mapping(self.info.get("final"))

    @property
    def task(self) -> str:
        """The name of the task; one of the user's own is not in the config."""
        own, named = mapping(self.info.get("from_python")).get("task"), self.config.get("task")
        # A group names the function that makes the task.
        return str(self.info.get("task") or own or mapping(named).get("call") or named or "")

    @property
    def is_language(self) -> bool:
        """Whether the loss is that of a language model, in nats per token."""
        return self.task == "language_modeling"

    @property
    def status(self) -> str:
        """How the run ended, as `run.json` says it."""
        return str(self.info.get("status") or "unknown")

    @property
    def last_step(self) -> int | None:
        """The last step of which anything was logged."""
        steps = [float(steps[-1]) for steps in (*(steps for steps, _ in self.series.values()), *self.gaps.values())]
        return int(max(steps)) if steps else None

    @property
    def planned_steps(self) -> int | None:
        """The steps that the config asks for."""
        steps = number(mapping(self.config.get("train")).get("steps"))
        return None if steps is None else int(steps)

    def starts(self, name: str) -> np.ndarray:
        """Where the pieces of a metric begin, between which it was not finite; see `piece_starts`."""
        return piece_starts(self.series[name][0], self.gaps.get(name))

    def is_lost(self, name: str) -> bool:
        """Whether the last value of a metric is null: it was not finite, and an earlier one would not be the last."""
        if name in self.final:
            return self.final[name] is None
        if name not in self.gaps:
            return False
        return name not in self.series or bool(self.gaps[name][-1] > self.series[name][0][-1])

    def last(self, name: str) -> float | None:
        """The last value of a metric; None where there is none, or it is not finite."""
        if name in self.final:
            return number(self.final[name])
        return float(self.series[name][1][-1]) if name in self.series and not self.is_lost(name) else None

    def shown(self, name: str) -> str | None:
        """The last value of a metric as text; None where there is none."""
        return "not finite" if self.is_lost(name) else rounded(self.last(name))

    def best(self, name: str = "eval_loss") -> tuple[int, float] | None:
        """The step and value where a metric of evaluations was lowest; None where it was never logged.

        Where the last ones are over other held-out rows than those before, it is the best of the last ones.
        """
        if name not in self.series:
            return None
        steps, values = self.series[name]
        compared = steps > compared_after(self.info)
        steps, values = (steps[compared], values[compared]) if compared.any() else (steps, values)
        at = int(values.argmin())
        return int(steps[at]), float(values[at])

    def end(self, name: str) -> float | None:
        """The mean of the last tenth of the rows of a metric; None where its last value is lost.

        A single row is of a single batch: the lowest one of a run favours small batches, whose losses vary the most.
        """
        if name not in self.series or self.is_lost(name):
            return None
        values = self.series[name][1]
        last = values[-max(1, len(values) // 10) :]
        return float(np.sum(last / len(last)))

    def baseline(self) -> Reference | None:
        """The loss of who knows nothing of the inputs: a uniform guess among classes or tokens, the mean of numbers.

        None for other tasks, and where the data does not say it.
        """
        data, model = mapping(self.info.get("data")), mapping(self.config.get("model"))
        traced = number(mapping(self.info.get("model")).get("num_outputs"))
        if self.is_language:
            count, noun = number(data.get("vocab_size")) or traced or number(model.get("vocab_size")), "tokens"
        elif self.task == "classification":
            sizes = (data.get("num_outputs"), traced, model.get("num_classes"), model.get("num_outputs"))
            count, noun = next((size for size in map(number, sizes) if size), None), "classes"
        elif self.task == "regression":
            deviations = mapping(data.get("reading")).get("target_deviation")
            squares = [value**2 for value in map(number, deviations or ()) if value is not None]
            return Reference(OF_MEAN, sum(squares) / len(squares)) if squares else None
        else:
            return None
        if count is None or count < 2:
            return None
        return Reference(f"uniform guess, {count:,} {noun}", math.log(count))


def read_files(run_dir: Path) -> RunFiles:
    """Read what a page shows of a run; whatever is missing or damaged is empty.

    Raises:
        ConfigError: `metrics.jsonl` is there and cannot be read, so that a page without curves would be false.
    """
    run_dir = Path(run_dir)
    info = read_json(run_dir / "run.json")
    name = str(info.get("name") or run_dir.resolve().name)
    path = run_dir / "metrics.jsonl"
    try:
        series, gaps = read_series(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; it holds the rows of metrics of the run") from None
    return RunFiles(run_dir, name, info, series, gaps)


def read_json(path: Path) -> Mapping[str, Any]:
    """Read a JSON object; empty where the file is missing or damaged: a page shows the rest all the same."""
    try:
        return mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
