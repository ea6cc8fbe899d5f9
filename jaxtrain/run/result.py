"""How a run ended."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.metrics.run_card import run_text
from jaxtrain.run.run_path import RunPath

if TYPE_CHECKING:
    from jaxtrain.train.state import TrainState


@dataclass(frozen=True)
class Result(RunPath):
    """How a run ended.

    Attributes:
        run_dir: where everything was written.
        state: the last state, on the mesh.
        metrics: last logged row and evaluation.
        step: steps done.

    Example:
        >>> overrides = {"train.steps": 2, "logging.report": False}
        >>> result = jt.run_config("digits_mlp", overrides=overrides, run_dir="runs/two")
        done: step 2, eval accuracy ..., eval loss ...
        >>> result.step, "eval_loss" in result.metrics
        (2, True)
    """

    run_dir: Path
    state: "TrainState"
    metrics: Mapping[str, float | int | None]
    step: int

    def __repr__(self) -> str:
        return f"Result of {run_text(self.run_dir)}"
