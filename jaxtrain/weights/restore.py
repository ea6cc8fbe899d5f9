"""The weights of a run's checkpoint, read into the shardings of a model, to evaluate or use it."""

from collections.abc import Callable
from pathlib import Path

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.train.state import EvaluationState
from jaxtrain.weights.fill import Target
from jaxtrain.weights.load import read_step


def restore_for_evaluation(
    run_dir: Path,
    model: ShardedModel,
    *,
    step: int | None,
    report: Callable[[str], None],
    moved_to: str | None = None,
) -> EvaluationState:
    """Read parameters and model state of one checkpoint into the shardings of a model; the run may be training.

    Args:
        run_dir: directory of the run.
        model: gives the shapes and shardings.
        step: step of the checkpoint; None: the newest intact one.
        report: called with a line for each damaged checkpoint that is passed over.
        moved_to: where the base of an adapter run is; None: where it was.
    """
    # What a run of adapters trains besides them, and so saves in another dtype, is known to that run alone.
    is_adapted = model.model.adapted is not None
    target = Target(model, trains=lambda path: is_adapted)
    with Checkpointer(checkpoint_folder(run_dir), read_only=True) as checkpointer:
        try:
            number, weights = read_step(checkpointer, step, target, path=str(run_dir), moved_to=moved_to, report=report)
        except ConfigError as error:
            raise CheckpointError(f"the checkpoint is of another model: {error}") from None
    return EvaluationState(weights.params or {}, weights.model_state or {}, number)
