"""The parameters of a checkpoint for evaluation: restored without optimizer state, straight into a mesh's shardings."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import DamagedError, list_steps, live_steps
from jaxtrain.checkpoint.kept_weights import read_kept_weights
from jaxtrain.checkpoint.mirror import Mirror, mirror_folder
from jaxtrain.checkpoint.places import Place
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.checkpoint.tree import is_inside, stored_name
from jaxtrain.config.files import is_run, read_run
from jaxtrain.errors import CheckpointError
from jaxtrain.runtime.tree import path_name

if TYPE_CHECKING:
    from jaxtrain.checkpoint.directory import CheckpointInfo
    from jaxtrain.models.model import ModelState, Params
    from jaxtrain.models.sharded import ShardedModel


@dataclass(frozen=True)
class Restored:
    """What evaluation needs of one checkpoint.

    Attributes:
        step: of the checkpoint.
        params: parameters, or their moving average where the run keeps one, or the weights that its optimizer keeps for
            evaluation (Lookahead, schedule-free).
        model_state: batch statistics and the like, or their moving average where the run keeps one.
    """

    step: int
    params: "Params" = field(repr=False)
    model_state: "ModelState" = field(repr=False)


def restore_for_evaluation(
    run_dir: Path,
    sharded_model: "ShardedModel",
    *,
    step: int | None,
    report: Callable[[str], None],
    moved_to: str | None = None,
) -> Restored:
    """Read parameters and model state of one checkpoint.

    The run may be training: a checkpoint that it deletes while it is read is passed over for a newer one.

    Args:
        run_dir: directory of the run.
        sharded_model: the run's model; its shardings are those of the result.
        step: of the checkpoint; None: the newest intact one.
        report: receives one line for each damaged checkpoint that is passed over.
        moved_to: where the base of an adapter run is; None: where it was.

    Raises:
        CheckpointError: there is no such checkpoint, none is intact, it is of another model, or its base is gone or
            another.
    """
    checkpoints = Checkpointer(_folder(run_dir, report), read_only=True)
    steps = checkpoints.steps()
    if not steps:
        raise CheckpointError(f"no checkpoint in {checkpoints.directory}; the run saves one at its end or on a signal")
    if step is not None and step not in steps:
        raise CheckpointError(f"no checkpoint of step {step} in {checkpoints.directory}; there are {_listed(steps)}")
    damaged: dict[int, str] = {}
    with checkpoints:
        # Both parts must be of one step, so a damaged one is passed over here and not in the checkpointer.
        while candidates := [one for one in checkpoints.steps() if one not in damaged and step in (None, one)]:
            candidate = candidates[-1]
            try:
                return _restore(checkpoints, sharded_model, candidate, run_dir, moved_to)
            except DamagedError as error:
                damaged[candidate] = str(error)
                found = _restored_copy(checkpoints, sharded_model, candidate, run_dir, moved_to)
                if found is not None:
                    report(f"{error}; its copy in the mirror is used")
                    return found
                if step is None and candidate in checkpoints.steps():
                    report(f"{error}; an older one is used")
    first = next(iter(damaged.values()), f"step {step} was deleted while it was read")
    raise CheckpointError(first if step is not None else f"no intact checkpoint is left in {run_dir}: {first}")


def _folder(run_dir: Path, report: Callable[[str], None]) -> Place:
    """The checkpoints of a run, or their second copies where there are none."""
    folder = checkpoint_folder(run_dir)
    copies = None if live_steps(folder) else _copies(run_dir)
    if copies is None or not list_steps(copies):
        return folder
    report(f"no checkpoint is left in {folder}: the copies in {copies} are used")
    return copies


def _copies(run_dir: Path) -> Place | None:
    """Where the second copies of a run's checkpoints are; None: it has none."""
    settings = read_run(run_dir)["config"].get("checkpoint") if is_run(run_dir) else None
    return mirror_folder(settings.get("mirror") if isinstance(settings, dict) else None, run_dir)


def _restored_copy(
    checkpoints: Checkpointer, sharded_model: "ShardedModel", step: int, run_dir: Path, moved_to: str | None
) -> Restored | None:
    """The same of the second copy of a damaged step; None where there is no intact copy."""
    copies = _copies(run_dir)
    if copies is None or copies == checkpoints.directory or step not in checkpoints.steps():
        return None
    if step not in list_steps(copies) or not Mirror(copies, checkpoints.directory).is_same(step):
        return None
    with Checkpointer(copies, read_only=True) as second, contextlib.suppress(DamagedError):
        return _restore(second, sharded_model, step, run_dir, moved_to)
    return None


def _restore(
    checkpoints: Checkpointer, sharded_model: "ShardedModel", step: int, run_dir: Path, moved_to: str | None
) -> Restored:
    import jax

    from jaxtrain.train.base import base_of
    from jaxtrain.train.placement import average_shapes
    from jaxtrain.train.start import restore_base
    from jaxtrain.train.state import averaged_model_state, merge_leaves, select_leaves

    wanted_state, info = sharded_model.abstract_model_state, checkpoints.info(step)
    base = base_of(info.metadata)
    # The checkpoint itself says what it holds, and what has an average: no setting of the run need be known.
    wanted = sharded_model.abstract_params
    saved_names = {stored_name(name) for name in info.leaves}  # keys of a dict may hold `/` themselves
    if base is not None:
        wanted = select_leaves(wanted, lambda path: stored_name(f"params/{path}") in saved_names)
    averaged = {name for name in saved_names if is_inside(name, "ema")}
    if not averaged:
        params = _read_params(checkpoints, wanted, info)
        # Without an average of ours, what the optimizer keeps for evaluation, as `TrainState.evaluation_params` has it.
        params = read_kept_weights(checkpoints, params, step=step)
        model_state = checkpoints.restore(wanted_state, step=step, prefix="model_state")
    else:
        ema, ema_state = average_shapes(sharded_model, lambda path: stored_name(f"ema/{path}") in averaged)
        params = checkpoints.restore(ema, step=step, prefix="ema")
        if len(jax.tree.leaves(ema)) < len(jax.tree.leaves(wanted)):
            # Frozen parameters have no average.
            params = merge_leaves(params, _read_params(checkpoints, wanted, info))
        model_state = checkpoints.restore(wanted_state, step=step, prefix="model_state")
        saved = checkpoints.restore(ema_state, step=step, prefix="ema_model_state")
        model_state = averaged_model_state(saved, model_state)
    if base is not None:
        only = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
        below = restore_base(
            sharded_model, base, run_dir=run_dir, only=lambda path: path not in only, moved_to=moved_to
        )
        params = merge_leaves(params, below)
    return Restored(step, params, model_state)


def _read_params(checkpoints: Checkpointer, wanted: "Params", info: "CheckpointInfo") -> "Params":
    """Parameters of a checkpoint, which may hold them in other dtypes: what is trained is not known to who opens it."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.run.saved_floats import in_dtypes, with_saved_floats
    from jaxtrain.train.base import base_of

    def one(path: "jax.tree_util.KeyPath", leaf: "jax.ShapeDtypeStruct") -> "jax.ShapeDtypeStruct":
        _, dtype = info.leaves.get(stored_name(f"params/{path_name(path)}"), ((), leaf.dtype.name))
        kind = jnp.dtype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, kind, sharding=leaf.sharding)

    if base_of(info.metadata) is not None:
        adapters = jax.tree_util.tree_map_with_path(one, wanted)
        return checkpoints.restore(adapters, step=info.step, prefix="params")
    saved = checkpoints.restore(with_saved_floats(wanted, info.leaves), step=info.step, prefix="params")
    return in_dtypes(saved, wanted)


def quantized_params(params: "Params", sharded_model: "ShardedModel", format: str) -> "tuple[Params, str]":
    """The parameters quantized on their devices, and a line for people."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.metrics.format import format_bytes
    from jaxtrain.models.quantize import quantize, quantized_bytes

    small = jax.jit(lambda params: quantize(params, sharded_model.model, format))(params)
    compute = jnp.dtype(sharded_model.policy.compute_dtype)
    after, before = map(format_bytes, quantized_bytes(small, compute))
    return small, f"{format}: linear layers of {after} instead of {before} in {compute.name}"


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps[-10:]))
