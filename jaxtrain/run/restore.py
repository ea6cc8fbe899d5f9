"""What is read from checkpoints: the base of adapters, the state to go on from, the parameters for evaluation."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import CheckpointInfo, DamagedError, list_steps, read_info
from jaxtrain.checkpoint.kept_weights import read_kept_weights
from jaxtrain.checkpoint.run_folder import checkpoint_folder, find_checkpoint
from jaxtrain.checkpoint.tree import is_inside, stored_name
from jaxtrain.config.arguments import is_store_address
from jaxtrain.config.model import published_from
from jaxtrain.errors import CheckpointError
from jaxtrain.interop.formats.hub import is_published
from jaxtrain.interop.settings import fresh_parts
from jaxtrain.metrics.format import format_bytes
from jaxtrain.models.adapters import quantize, quantized_bytes
from jaxtrain.models.model import Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.precision.policy import LossScale
from jaxtrain.runtime.tree import path_name
from jaxtrain.train.assemble import OwnStep, Run
from jaxtrain.train.base import BaseRecord, base_of, describe_base, with_base, without_base
from jaxtrain.train.spikes import first_history
from jaxtrain.train.start import restore_base
from jaxtrain.train.state import (
    EvaluationState,
    TrainState,
    average_shapes,
    averaged_model_state,
    merge_leaves,
    select_leaves,
)
from jaxtrain.train.step import TrainStep


def trained_leaves(step: TrainStep) -> Callable[[str], bool] | None:
    """Parameter path -> whether checkpoints of this step hold it; None: they hold all. Those of adapters do not."""
    adapted = step.model.adapted
    return None if adapted is None or adapted.lora is None else step.program.settings.trainable


def start_of(run: Run, own_step: OwnStep) -> dict[str, Any]:
    """What `TrainStep.init` takes besides the seed: what the run starts from."""
    given = {"params": own_step.params, "model_state": own_step.model_state, "skip": own_step.skip}
    published = published_from(run.config.model)
    if own_step.params is None and published is not None:
        given |= {"params": published, "skip": [*own_step.skip, *fresh_parts(run.config.model)]}
    if run.config.finetune.adapter is not None:
        given["adapter"] = run.config.finetune.adapter
    path = given["params"]
    if trained_leaves(run.step) is not None and isinstance(path, str | Path) and not is_published(path):
        # The base of a run is one of its steps: the newest may be another one when it is asked for again.
        found = find_checkpoint(path)
        step = list_steps(found.directory)[-1] if found.step is None else found.step
        given["params"] = str(found.directory / str(step))
    return given


def describe_start(run: Run, state: TrainState, given: dict[str, Any]) -> BaseRecord | None:
    """The base of a run that starts, from its state at step 0; None where its checkpoints hold every parameter."""
    trains = trained_leaves(run.step)
    if trains is None:
        return None
    path, seed = given["params"], run.config.seed
    describe = functools.partial(describe_base, state.params, trains)
    if path is None:
        return describe(format="drawn", path=None, seed=seed)
    if isinstance(path, str | Path):
        place = str(path) if is_store_address(str(path)) else str(Path(path).absolute())
        if is_published(path):
            return describe(format="published", path=place, seed=seed, skip=tuple(given["skip"]))
        found = find_checkpoint(path)
        assert found.step is not None
        below = base_of(read_info(found.directory, found.step).metadata)
        if below is None:
            return describe(format="run", path=place, seed=seed, skip=tuple(given["skip"]))
        # Adapters of another adapter run: the same base, unless something that was trained there is frozen here.
        own = describe(format=below.format, path=below.path, seed=below.seed, skip=below.skip)
        if below.format != "kept" and own.digests.items() <= below.digests.items():
            return own
    return describe(format="kept", path=None, seed=seed)


def saved_form(step: TrainStep, checkpointer: Checkpointer) -> TrainState:
    """The state that the newest intact checkpoint of a run holds, as shapes with shardings.

    Its history of losses and its loss scale have the form of the checkpoint: spikes and fp16 may come and go.
    """
    target, leaves = without_base(step.abstract_state, trained_leaves(step)), {}
    for candidate in reversed(checkpointer.steps()):
        with contextlib.suppress(DamagedError):
            leaves = checkpointer.info(candidate).leaves
            break
    for name in ("spikes", "loss_scale"):
        saved = {key.removeprefix(f"{name}."): leaf for key, leaf in leaves.items() if is_inside(key, name)}
        kept = getattr(target, name)
        if saved != {key: (leaf.shape, leaf.dtype.name) for key, leaf in ({} if kept is None else vars(kept)).items()}:
            form: Any = {key: jax.ShapeDtypeStruct(*leaf, sharding=target.step.sharding) for key, leaf in saved.items()}
            target = dataclasses.replace(target, **{name: form})
    return target


def _restored_state(step: TrainStep, checkpointer: Checkpointer) -> TrainState:
    """The state of the newest intact checkpoint; frozen parameters of adapters are None.

    A history of losses or a loss scale of another form begins anew.
    """
    state = checkpointer.restore(saved_form(step, checkpointer))
    wanted, settings = step.abstract_state, step.program.settings
    rule, scaling = settings.spikes, settings.loss_scaling
    begun: dict[str, Callable[[], Any]] = {
        "spikes": lambda: rule and first_history(rule),
        "loss_scale": lambda: wanted.loss_scale and LossScale.create(scaling),
    }
    for name, create in begun.items():
        if jax.tree.structure(getattr(state, name)) != jax.tree.structure(getattr(wanted, name)):
            new = jax.jit(create, out_shardings=step.state_shardings.step)()
            state = dataclasses.replace(state, **{name: new})
    return state


def resumed_state(
    run: Run, run_dir: Path, own_step: OwnStep, checkpointer: Checkpointer
) -> tuple[TrainState, BaseRecord | None]:
    """The newest intact state of a run, whole, and its base where checkpoints do not hold it."""
    state, trains, path = _restored_state(run.step, checkpointer), trained_leaves(run.step), own_step.params
    record = None if trains is None else base_of(checkpointer.metadata(int(state.step)))
    if record is None or trains is None:
        return state, None
    moved_to = published_from(run.config.model) if path is None else str(path) if isinstance(path, str | Path) else None
    only, model = (lambda path: not trains(path)), run.step.sharded_model
    return with_base(state, restore_base(model, record, run_dir=run_dir, only=only, moved_to=moved_to)), record


def restore_for_evaluation(
    run_dir: Path,
    sharded_model: ShardedModel,
    *,
    step: int | None,
    report: Callable[[str], None],
    moved_to: str | None = None,
) -> EvaluationState:
    """Read parameters and model state of one checkpoint, without optimizer state, into the shardings of a model.

    The run may be training: a checkpoint that it deletes while it is read is passed over for a newer one.

    Args:
        run_dir: directory of the run.
        sharded_model: the run's model; its shardings are those of the result.
        step: of the checkpoint; None: the newest intact one.
        report: receives one line for each damaged checkpoint that is passed over.
        moved_to: where the base of an adapter run is; None: where it was.

    Raises:
        CheckpointError: there is none, none is intact, it is of another model, or its base is gone or another.
    """
    damaged: dict[int, str] = {}
    with Checkpointer(checkpoint_folder(run_dir), read_only=True) as checkpoints:
        if step is not None:
            return _restore(checkpoints, sharded_model, step, run_dir, moved_to)
        # Both parts must be of one step, so a damaged one is passed over here and not in the checkpointer.
        while candidates := [one for one in checkpoints.steps() if one not in damaged]:
            try:
                return _restore(checkpoints, sharded_model, candidates[-1], run_dir, moved_to)
            except DamagedError as error:
                damaged[candidates[-1]] = str(error)
                if candidates[-1] in checkpoints.steps():
                    report(f"{error}; an older one is used")
    if damaged:
        raise CheckpointError(f"no intact checkpoint is left in {run_dir}: {next(iter(damaged.values()))}")
    raise CheckpointError(f"no checkpoint in {checkpoints.directory}; the run saves one at its end or on a signal")


def _restore(
    checkpoints: Checkpointer, sharded_model: ShardedModel, step: int, run_dir: Path, moved_to: str | None
) -> EvaluationState:
    info = checkpoints.info(step)
    base = base_of(info.metadata)
    # The checkpoint itself says what it holds, and what has an average: no setting of the run need be known.
    wanted = sharded_model.abstract_params
    saved_names = {stored_name(name) for name in info.leaves}  # keys of a dict may hold `/` themselves
    if base is not None:
        wanted = select_leaves(wanted, lambda path: stored_name(f"params/{path}") in saved_names)
    averaged = {name for name in saved_names if is_inside(name, "ema")}
    model_state = checkpoints.restore(sharded_model.abstract_model_state, step=step, prefix="model_state")
    if not averaged:
        # Without an average of ours, what the optimizer keeps for evaluation, as `TrainState.evaluation_params` has it.
        params = read_kept_weights(checkpoints, _read_params(checkpoints, wanted, info), step=step)
    else:
        ema, ema_state = average_shapes(sharded_model, lambda path: stored_name(f"ema/{path}") in averaged)
        params = checkpoints.restore(ema, step=step, prefix="ema")
        if len(jax.tree.leaves(ema)) < len(jax.tree.leaves(wanted)):  # frozen parameters have no average
            params = merge_leaves(params, _read_params(checkpoints, wanted, info))
        saved = checkpoints.restore(ema_state, step=step, prefix="ema_model_state")
        model_state = averaged_model_state(saved, model_state)
    if base is not None:
        only = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
        below = restore_base(
            sharded_model, base, run_dir=run_dir, only=lambda path: path not in only, moved_to=moved_to
        )
        params = merge_leaves(params, below)
    return EvaluationState(params, model_state, step)


def _read_params(checkpoints: Checkpointer, wanted: Params, info: CheckpointInfo) -> Params:
    """Parameters, read in the dtypes that they were saved in: frozen ones of `bf16_pure` in float32."""

    def as_saved(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        _, dtype = info.leaves.get(stored_name(f"params/{path_name(path)}"), ((), leaf.dtype.name))
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, dtype if is_float else leaf.dtype, sharding=leaf.sharding)

    found = checkpoints.restore(jax.tree_util.tree_map_with_path(as_saved, wanted), step=info.step, prefix="params")
    if base_of(info.metadata) is not None:
        return found

    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), found, wanted)


def quantized_params(params: Params, sharded_model: ShardedModel, format: str) -> tuple[Params, str]:
    """The parameters quantized on their devices, and a line for people."""
    small = jax.jit(lambda params: quantize(params, sharded_model.model, format))(params)
    compute = jnp.dtype(sharded_model.policy.compute_dtype)
    after, before = map(format_bytes, quantized_bytes(small, compute))
    return small, f"{format}: linear layers of {after} instead of {before} in {compute.name}"
