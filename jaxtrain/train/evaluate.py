"""Evaluation on held-out rows: exact means over all of them, padding excluded."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxtrain.tasks import Sums
from jaxtrain.train.given_state import check_batch, check_consistent, check_not_donated
from jaxtrain.train.pipelined import evaluation_sums
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep


class Evaluator:
    """Means of loss and metrics over batches, with the parameters (or their moving average) of a state.

    Args:
        step: the train step whose model, task, mesh and precision are used.
    """

    def __init__(self, step: TrainStep):
        self._step = step
        self._jitted = jax.jit(self._sums, compiler_options={**step.compiler_options.used} or None)

    def _sums(self, params: Any, model_state: Any, batch: dict[str, Any]) -> Sums:
        step = self._step
        with step.context():
            if step.pipeline is not None:
                loss_sum, weight, metrics = evaluation_sums(
                    step.pipeline, step.model, step.task, step.policy, params, batch
                )
            else:
                inputs = batch["inputs"]
                outputs, _ = step.apply_for_loss(params, model_state, inputs, key=None, train=False)
                loss_sum, weight, metrics = step.task.evaluation(outputs, batch)
        return {"loss": (loss_sum, weight), **metrics}

    def __call__(self, state: TrainState, batches: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        """Evaluate.

        Args:
            state: its `evaluation_params` and `model_state` are used.
            batches: on the mesh, of one shape; `weights` of 0 mark padding.

        Returns:
            `eval_loss`, the task's metrics as `eval_*`, and `eval_perplexity` for language models.

        Raises:
            ConfigError: a state that was donated to a step, or whose average is not of its parameters.
        """
        check_not_donated({"params": state.evaluation_params, "model_state": state.model_state})
        check_consistent(state, self._step)
        totals: dict[str, list[float]] = {}
        for batch in batches:
            check_batch(batch)
            self._step.batch_shardings(batch)  # one line where rows do not divide, before anything is traced
            sums = jax.device_get(self._jitted(state.evaluation_params, state.model_state, dict(batch)))
            for name, (total, weight) in sums.items():
                entry = totals.setdefault(name, [0.0, 0.0])
                entry[0] += float(total)
                entry[1] += float(weight)
        means = {f"eval_{name}": total / weight for name, (total, weight) in totals.items() if weight}
        if self._step.task.name == "language_modeling" and "eval_loss" in means:
            means["eval_perplexity"] = math.exp(min(means["eval_loss"], 50.0))
        return means
