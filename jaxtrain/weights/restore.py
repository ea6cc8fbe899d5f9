"""The weights of a run's checkpoint, read into the shardings of a model, to evaluate or use it."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import CheckpointInfo, DamagedError
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.checkpoint.tree import is_inside, stored_name
from jaxtrain.errors import CheckpointError
from jaxtrain.models.model import Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import Reference
from jaxtrain.runtime.tree import merge_leaves, path_name, paths_of
from jaxtrain.train.state import EvaluationState, average_shapes, averaged_model_state, select_leaves
from jaxtrain.weights.base import base_of
from jaxtrain.weights.load import restore_base


def restore_for_evaluation(
    run_dir: Path,
    sharded_model: ShardedModel,
    *,
    step: int | None,
    report: Callable[[str], None],
    moved_to: str | None = None,
) -> EvaluationState:
    """Read parameters and model state of one checkpoint into the shardings of a model; the run may be training.

    Args:
        run_dir: directory of the run.
        sharded_model: gives the shapes and shardings.
        step: step of the checkpoint; None: the newest intact one.
        report: called with a line for each damaged checkpoint that is passed over.
        moved_to: where the base of an adapter run is; None: where it was.
    """
    damaged = ""
    with Checkpointer(checkpoint_folder(run_dir), read_only=True) as checkpoints:
        if step is not None:
            return _restore(checkpoints, sharded_model, step, run_dir, moved_to)
        # Parameters and model state must be of one step: the checkpointer would pass over a damaged one of either.
        for candidate in reversed(checkpoints.steps()):
            try:
                return _restore(checkpoints, sharded_model, candidate, run_dir, moved_to)
            except DamagedError as error:
                damaged = damaged or str(error)
                report(f"{error}; an older one is used")
    if damaged:
        raise CheckpointError(f"no intact checkpoint is left in {run_dir}: {damaged}")
    raise CheckpointError(f"no checkpoint in {checkpoints.directory}; the run saves one at its end or on a signal")


def _restore(
    checkpoints: Checkpointer, sharded_model: ShardedModel, step: int, run_dir: Path, moved_to: str | None
) -> EvaluationState:
    info = checkpoints.info(step)
    base = base_of(info.metadata)
    # The checkpoint itself tells what it holds, and what has an average, whatever the settings of the run are.
    saved_names = {stored_name(name) for name in info.leaves}  # keys of a dict may hold `/` themselves
    abstract = sharded_model.abstract_params
    if base is not None:
        abstract = select_leaves(abstract, lambda path: stored_name(f"params/{path}") in saved_names)
    model_state = checkpoints.restore(sharded_model.abstract_model_state, step=step, prefix="model_state")
    reference = None
    if any(is_inside(name, "reference") for name in saved_names):
        # None in place of frozen parameters, which are those that are evaluated.
        copied = select_leaves(abstract, lambda path: stored_name(f"reference/params/{path}") in saved_names)
        saved = Reference(_as_saved(copied, info, "reference/params"), sharded_model.abstract_model_state)
        reference = checkpoints.restore(saved, step=step, prefix="reference")
    if not any(is_inside(name, "ema") for name in saved_names):
        params = _read_params(checkpoints, abstract, info)
    else:
        ema, ema_state = average_shapes(sharded_model, lambda path: stored_name(f"ema/{path}") in saved_names)
        params = checkpoints.restore(ema, step=step, prefix="ema")
        if len(jax.tree.leaves(ema)) < len(jax.tree.leaves(abstract)):  # frozen parameters have no average
            params = merge_leaves(params, _read_params(checkpoints, abstract, info))
        average = checkpoints.restore(ema_state, step=step, prefix="ema_model_state")
        model_state = averaged_model_state(average, model_state)
    if base is not None:
        paths = paths_of(params)
        frozen = restore_base(
            sharded_model, base, run_dir=run_dir, moved_to=moved_to, only=lambda path: path not in paths
        )
        params = merge_leaves(params, frozen)
    return EvaluationState(params, model_state, step, reference)


def _read_params(checkpoints: Checkpointer, abstract: Params, info: CheckpointInfo) -> Params:
    """Return parameters; those of an adapter keep the dtypes that they were saved in."""
    params = checkpoints.restore(_as_saved(abstract, info, "params"), step=info.step, prefix="params")
    if base_of(info.metadata) is not None:
        return params
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, abstract)


def _as_saved(abstract: Params, info: CheckpointInfo, part: str) -> Params:
    """Return shapes of the parameters of a part of the state ("params") in the dtypes that a checkpoint has."""

    def as_saved(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = stored_name(f"{part}/{path_name(path)}")
        if name not in info.leaves or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        # Frozen parameters of `bf16_pure` are saved in float32, the reference of a bf16 run in bfloat16.
        return jax.ShapeDtypeStruct(leaf.shape, info.leaves[name][1], sharding=leaf.sharding)

    return jax.tree_util.tree_map_with_path(as_saved, abstract)
