"""The weights of a run's checkpoint, read into the shardings of a model, to evaluate or use it."""

from collections.abc import Callable
from pathlib import Path

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.checkpoint.tree import is_inside, stored_name
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import Reference
from jaxtrain.runtime.tree import path_name
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
        reference = _read_reference(checkpointer, number, model)
    return EvaluationState(weights.params or {}, weights.model_state or {}, number, reference)


def _read_reference(checkpointer: Checkpointer, step: int, model: ShardedModel) -> Reference | None:
    """Read the model that the run started from, None in place of frozen parameters; None: the state has no copy."""
    info = checkpointer.info(step)
    if not any(is_inside(name, "reference") for name in info.leaves):
        return None

    def as_saved(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | None:
        saved = info.leaves.get(stored_name(f"reference/params/{path_name(path)}"))
        if saved is None:
            return None
        # In the compute dtype of the run.
        return jax.ShapeDtypeStruct(leaf.shape, saved[1], sharding=leaf.sharding)

    params = jax.tree_util.tree_map_with_path(as_saved, model.abstract_params)
    return checkpointer.restore(Reference(params, model.abstract_model_state), step=step, prefix="reference")
