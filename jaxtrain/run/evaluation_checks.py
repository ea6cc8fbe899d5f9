"""What an evaluator is given, checked before anything is traced: one line for each mistake."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxtrain.config.arguments import check_kind, refusal
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.precision.kernels import is_kernel
from jaxtrain.train.batch import BatchSource
from jaxtrain.train.state import EvaluationState, TrainState
from jaxtrain.train.step import TrainStep


def check_evaluated(step: Any) -> None:
    """Raise where something is neither a train step nor a sharded model.

    Raises:
        ConfigError: what was given, and what to write instead.
    """
    write = "Evaluator(step), or Evaluator(shard_model(model), task)"
    check_kind(step, (TrainStep, ShardedModel), what="Evaluator", takes="a train step", write=write)


def check_evaluation(sharded_model: ShardedModel, state: Any, batches: Any) -> None:
    """Raise where an evaluator is called with no state, with other parameters, or with no batches.

    Args:
        sharded_model: that is evaluated.
        state: what was given as the state.
        batches: what was given as the batches.

    Raises:
        ConfigError: what was given, and what to write instead.
    """
    if not isinstance(state, TrainState | EvaluationState):
        write = "evaluator(state, batches), and EvaluationState(params, {}) for parameters that no state holds"
        raise ConfigError(refusal("Evaluator: state", "a state", state, write))
    what, takes = "Evaluator: batches", "batches to iterate over"
    if isinstance(batches, Mapping):
        raise ConfigError(refusal(what, takes, batches, "[batch] for one batch"))
    if isinstance(batches, BatchSource) or not isinstance(batches, Iterable):
        write = "prefetch(step.loader(batches), 0, len(batches)), or [batch] for one batch"
        raise ConfigError(refusal(what, takes, batches, write))
    _check_parameters(sharded_model, state.evaluation_params)


def _check_parameters(sharded_model: ShardedModel, params: Any) -> None:
    """Raise where parameters have other paths than those of the model; quantized kernels keep theirs."""
    found, wanted = _paths(params), _paths(sharded_model.abstract_params)
    for paths, others, verb in ((wanted, found, "is missing"), (found, wanted, "is not one of its parameters")):
        different = [path for path in paths if path not in others]
        if different:
            raise ConfigError(
                f"the parameters of this state do not fit the model {sharded_model.model.name}: {different[0]} {verb}; "
                "give the state of a step with this model"
            )


def _paths(params: Any) -> list[str]:
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_kernel)
    return [path_name(path) for path, _ in flat]
