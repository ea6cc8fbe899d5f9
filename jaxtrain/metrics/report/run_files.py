"""What a page knows of a run: its files, read with patience, and what follows from them at once."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.metrics.history import Series, read_series
from jaxtrain.metrics.report.html import mapping, number, rounded

# The baseline of a regression.
OF_MEAN = "the mean of the targets"


@dataclass(frozen=True)
class RunFiles:
    """A run as its directory describes it: `run.json`, empty where it is missing, and the series of `metrics.jsonl`."""

    run_dir: Path
    name: str
    info: Mapping[str, Any]
    series: Series

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved config."""
        return mapping(self.info.get("config"))

    @property
    def task(self) -> str:
        """The name of the task."""
        named = self.config.get("task")
        return str(self.info.get("task") or mapping(named).get("call") or named or "")

    @property
    def status(self) -> str:
        """How the run ended, as `run.json` says it."""
        return str(self.info.get("status") or "unknown")

    @property
    def kind(self) -> str:
        """The CSS class of the status; a run of the kind `bad` is never the best."""
        if self.status in ("done", "early stopped"):
            return "good"
        return "plain" if self.status in ("running", "preempted", "stopped by a callback", "unknown") else "bad"

    @property
    def last_step(self) -> int | None:
        """The last step of which anything was logged."""
        return int(max(steps[-1] for steps, _ in self.series.values())) if self.series else None

    @property
    def resumed_steps(self) -> list[int]:
        """The steps after which the run was resumed."""
        return [step for step in self.info.get("resumed_after") or () if isinstance(step, int)]

    def last(self, name: str) -> float | None:
        """The last value of a metric, NaN where it is not finite; None where there is none."""
        final = mapping(self.info.get("final"))
        if name in final:
            found = number(final[name])
            return math.nan if found is None else found
        return float(self.series[name][1][-1]) if name in self.series else None

    def shown(self, name: str) -> str | None:
        """The last value of a metric as text; None where there is none."""
        value = self.last(name)
        return "not finite" if value is not None and math.isnan(value) else rounded(value)

    def finite(self, name: str) -> np.ndarray:
        """The finite values of a metric."""
        values = self.series.get(name, (np.zeros(0), np.zeros(0)))[1]
        return values[np.isfinite(values)]

    def best(self, name: str = "eval_loss") -> tuple[int, float] | None:
        """The step and value where a metric was lowest, among evaluations of the same rows; None: never finite."""
        if not len(self.finite(name)):
            return None
        steps, values = self.series[name]
        at = int(np.where(np.isfinite(values), values, np.inf).argmin())
        return int(steps[at]), float(values[at])

    def end(self, name: str) -> float | None:
        """The mean of the last tenth of the rows of a metric; None where its last value is not finite."""
        if name not in self.series or not np.isfinite(self.series[name][1][-1]):
            return None
        values = self.series[name][1]
        return float(np.nanmean(values[-max(1, len(values) // 10) :]))

    def baseline(self) -> tuple[str, float] | None:
        """The loss of who knows nothing of the inputs: a uniform guess among classes or tokens, the mean of numbers."""
        data, model = mapping(self.info.get("data")), mapping(self.info.get("model"))
        if self.task == "regression":
            squares = [value**2 for value in mapping(data.get("reading")).get("target_deviation") or ()]
            return (OF_MEAN, sum(squares) / len(squares)) if squares else None
        nouns = {"language_modeling": ("tokens", "vocab_size"), "classification": ("classes", "num_outputs")}
        noun, key = nouns.get(self.task, ("", ""))
        own = mapping(self.config.get("model"))
        counts = (data.get(key), model.get("num_outputs"), own.get("num_classes"), own.get(key))
        count = next((found for found in map(number, counts) if found), None) if noun else None
        return None if count is None or count < 2 else (f"uniform guess, {count:,} {noun}", math.log(count))

    def wall_seconds(self) -> float | None:
        """Seconds that all processes of the run took."""
        seconds = number(mapping(self.info.get("final")).get("wall_seconds"))
        return seconds or sum(mapping(self.info.get("seconds")).values()) or None


def read_files(run_dir: Path) -> RunFiles:
    """Read what a page shows of a run; a ConfigError where `metrics.jsonl` is there and cannot be read."""
    run_dir = Path(run_dir)
    info = read_json(run_dir / "run.json")
    path = run_dir / "metrics.jsonl"
    try:
        series = read_series(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; it holds the rows of metrics of the run") from None
    return RunFiles(run_dir, str(info.get("name") or run_dir.resolve().name), info, series)


def read_json(path: Path) -> Mapping[str, Any]:
    """Read a JSON object; empty where the file is missing or damaged: a page shows the rest all the same."""
    try:
        return mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return {}
