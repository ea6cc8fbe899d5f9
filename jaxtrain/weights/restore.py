"""The weights of a run's checkpoint, read into the shardings of a model, to evaluate or use it."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import CheckpointInfo
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.checkpoint.tree import is_inside, stored_name
from jaxtrain.models.model import Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.runtime.tree import merge_leaves, path_name, paths_of
from jaxtrain.train.state import EvaluationState, average_shapes, averaged_model_state, select_leaves
from jaxtrain.weights.base import base_of
from jaxtrain.weights.load import read_newest_intact, restore_base


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
    with Checkpointer(checkpoint_folder(run_dir), read_only=True) as checkpoints:

        def read(number: int) -> EvaluationState:
            return _restore(checkpoints, sharded_model, number, run_dir, moved_to)

        if step is not None:
            return read(step)
        return read_newest_intact(checkpoints, read, report=report)


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
    return EvaluationState(params, model_state, step)


def _read_params(checkpoints: Checkpointer, abstract: Params, info: CheckpointInfo) -> Params:
    """Return parameters; those of an adapter keep the dtypes that they were saved in."""

    def as_saved(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = stored_name(f"params/{path_name(path)}")
        if name not in info.leaves or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        # Frozen parameters of `bf16_pure` are saved in float32.
        return jax.ShapeDtypeStruct(leaf.shape, info.leaves[name][1], sharding=leaf.sharding)

    params = checkpoints.restore(jax.tree_util.tree_map_with_path(as_saved, abstract), step=info.step, prefix="params")
    if base_of(info.metadata) is not None:
        return params
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, abstract)
