"""What a run begins with or goes on from: which checkpoint, what may have changed since, and the state in it."""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import CheckpointInfo, DamagedError, list_steps
from jaxtrain.checkpoint.run_folder import checkpoint_folder, find_checkpoint
from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.checkpoint.tree import is_inside, stored_name
from jaxtrain.config.arguments import is_store_address
from jaxtrain.config.files import recorded_parts
from jaxtrain.config.model import published_from
from jaxtrain.config.secrets import redacted
from jaxtrain.errors import CheckpointError, ConfigError, DataError
from jaxtrain.interop.formats.hub import is_published
from jaxtrain.interop.settings import fresh_parts
from jaxtrain.metrics.history import flat
from jaxtrain.models.model import Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.run.callbacks import Given
from jaxtrain.runtime.tree import path_name
from jaxtrain.train.assemble import OwnStep, Run
from jaxtrain.train.base import BaseRecord, base_of, describe_base, with_base, without_base
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

_GO_ON = "use another run_dir, resume='never' to start anew, or resume='must' to resume with the change"
_SET_BACK = "set it back, use another run directory, or start again with --resume never (from Python resume='never')"
# What may change without the trained numbers being others: where and how fast a run computes, and what it writes. Other
# data is noticed by its content, and more steps are how a run is made longer.
MAY_CHANGE = (
    *("data", "parallel", "remat", "checkpoint", "evaluation", "logging", "profile", "watchdog"),
    *("name", "compilation_cache", "compiler_options", "optimizer.offload", "model.attention", "loss.logits"),
    *("loss.block", "train.prefetch", "train.workers", "train.max_skipped_in_a_row"),
)
# Evaluations before and after a change of these cannot be compared, as early stopping and `keep_best` do.
_COMPARED = (
    *("evaluation.max_batches", "evaluation.early_stopping.metric", "evaluation.early_stopping.mode"),
    *("task", "loss.label_smoothing", "loss.beta"),
)
# What the stream of batches has of the config; the rest of it describes the data.
_BATCH_KEYS = ("seed", "global_batch_size")
# What a run asks to be given again; other data is noticed by its content.
_GIVEN_AGAIN = ("model", "task", "optimizer")


def is_within(key: str, names: Sequence[str]) -> bool:
    """Whether a dotted key is one of the names, or in a group of such a name."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def choose_start(checkpointer: Checkpointer, resume: str | None) -> int | None:
    """The step to resume, or None for a fresh start."""
    # Process 0 decides for all: another may see an older listing of a network file system.
    found = from_process_0(lambda: -1 if (step := checkpointer.latest_step()) is None else step)
    if resume == "must" and found < 0:
        raise CheckpointError(f"--resume must, but there is no checkpoint in {checkpointer.directory}; use auto")
    return None if resume == "never" or found < 0 else found


def run_metadata(run: Run, given: Given) -> dict[str, Any]:
    """What a checkpoint says of its run: config, which rows batch k holds, names of the parts from Python."""
    state = run.step.abstract_state.optimizer_state
    # The types of an optax state name the transformations: `namedtuple[ScaleByLionState]`.
    states = dict.fromkeys(re.findall(r"namedtuple\[(\w+?)(?:State)?\]", str(jax.tree.structure(state))))
    optimizer = ", ".join(name for name in states if name not in ("Empty", "Masked", "MaskedNode"))
    return {
        "name": run.name,
        "config": redacted(run.config.model_dump(mode="json")),
        "stream": json.loads(json.dumps(run.stream)),
        "from_python": {
            "model": None if given.model is None else given.model.name,
            "task": None if given.task is None else given.task.name,
            "data": None if given.data is None else next(iter(given.data.description), "data"),
            "optimizer": None if given.own_step.optimizer is None else optimizer or "without state",
        },
    }


def check_resumed(
    checkpointer: Checkpointer, step: TrainStep, current: Mapping[str, Any], *, run_dir: Path, may_change: bool
) -> list[str]:
    """What changed since the newest checkpoint, each as `train.steps 600 -> 1200`, once this run can go on from it."""
    saved = checkpointer.metadata()
    before, after = saved["config"], current["config"]
    changes = _part_changes(saved, current, run_dir) | config_changes(before, after)
    check_stream(saved["stream"], current["stream"], run_dir=run_dir)
    shown = {key: f"{key} {old} -> {new}" for key, (old, new) in changes.items()}
    compares = after["evaluation"]["early_stopping"] or after["checkpoint"]["keep_best"]
    # The group of early stopping is None where there is none: one that begins compares with nothing before it.
    others = [shown[key] for key in changes if is_within(key, _COMPARED) and (changes[key][0] or "early" not in key)]
    if compares and others:
        raise ConfigError(f"{', '.join(others)}: evaluations before and after could not be compared; {_SET_BACK}")
    # A run that trained something else would return its old numbers as the new ones.
    is_longer = after["train"]["steps"] >= before["train"]["steps"]
    allowed = (*MAY_CHANGE, "train.steps") if is_longer else MAY_CHANGE
    differ = [text for key, text in shown.items() if not is_within(key, allowed)]
    if differ and not may_change:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ConfigError(f"{run_dir} holds a run with another configuration: {', '.join(differ[:3])}{more}; {_GO_ON}")
    try:
        checkpointer.check_like(without_base(step.abstract_state, trained_leaves(step)))
    except CheckpointError as error:
        changed = f"changed since: {', '.join([*shown.values()][:3])}; " if shown else ""
        raise CheckpointError(f"{error}; {changed}{_SET_BACK}") from None
    return [*shown.values()]


def check_stream(saved: Mapping[str, Any], current: Mapping[str, Any], *, run_dir: Path) -> None:
    """Refuse to go on with other batches: batch k would hold other rows, or evaluations be of other rows."""
    before, after = flat(saved), flat(current)
    differ = [key for key in (*_BATCH_KEYS, *sorted({*before, *after})) if before.get(key) != after.get(key)]
    if not differ:
        return
    key = differ[0]
    if key in _BATCH_KEYS:
        change = f"{key} {before.get(key)} -> {after.get(key)}"
        raise ConfigError(
            f"{run_dir} holds a run with another configuration: {change}, which no resume changes; {_SET_BACK}"
        )
    how = "evaluated on other held-out rows" if key.startswith("validation.") else "trained on other data"
    raise DataError(f"the checkpoint was {how}: {key} was {before.get(key)!r}, is {after.get(key)!r}; {_SET_BACK}")


def config_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> its value before and after, where two resolved configs differ; of a new kind, the kind alone."""
    before, after = flat(saved), flat(current)
    found = {key: (before.get(key), after.get(key)) for key in sorted({*before, *after})}
    found = {key: values for key, values in found.items() if values[0] != values[1]}
    kinds = [key.removesuffix(".kind") for key in found if key.endswith(".kind")]
    return {key: values for key, values in found.items() if key.endswith(".kind") or not is_within(key, kinds)}


def _part_changes(saved: Mapping[str, Any], current: Mapping[str, Any], run_dir: Path) -> dict[str, tuple[Any, Any]]:
    """Model, task and optimizer whose names differ, as part -> names before and after."""
    before, after = recorded_parts(saved), recorded_parts(current)
    for part in _GIVEN_AGAIN:
        if before[part] is not None and after[part] is None:
            raise ConfigError(
                f"the run in {run_dir} was trained with {'an' if part == 'optimizer' else 'a'} {part} from Python "
                f"({before[part]}): call jt.run_config(..., {part}=...) with it (or jt.fit, if that made the run), use "
                "another run directory, or start again with resume never"
            )
    names = {part: (before[part] or "of the config", after[part] or "of the config") for part in _GIVEN_AGAIN}
    return {part: (old, new) for part, (old, new) in names.items() if old != new}


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
    if trained_leaves(run.step) is None or path is None:
        return given
    if not isinstance(path, str | Path):
        raise ConfigError(
            "checkpoints of adapters name their base weights, but params= are arrays; give the path of a run, of a "
            "checkpoint that holds them, or of a published folder"
        )
    if not is_published(path):
        # The base of a run is one of its steps: the newest may be another one when it is asked for again.
        found = find_checkpoint(path)
        step = list_steps(found.directory)[-1] if found.step is None else found.step
        given["params"] = str(found.directory / str(step))
    return given


def describe_start(run: Run, state: TrainState, given: Mapping[str, Any]) -> BaseRecord | None:
    """The base of a run that starts, from its state at step 0; None where its checkpoints hold every parameter."""
    trains, path = trained_leaves(run.step), given["params"]
    if trains is None:
        return None
    describe = functools.partial(describe_base, state.params, trains)
    if path is None:
        return describe(format="drawn", path=None, seed=run.config.seed)
    how = {"path": str(path) if is_store_address(str(path)) else str(Path(path).absolute()), "seed": run.config.seed}
    return describe(format="published" if is_published(path) else "run", skip=tuple(given["skip"]), **how)


def resumed_state(
    run: Run, run_dir: Path, own_step: OwnStep, checkpointer: Checkpointer
) -> tuple[TrainState, BaseRecord | None]:
    """The newest intact state of a run, whole, and its base where checkpoints do not hold it."""
    trains, path = trained_leaves(run.step), own_step.params
    state = checkpointer.restore(without_base(run.step.abstract_state, trains))
    record = None if trains is None else base_of(checkpointer.metadata(int(state.step)))
    if record is None or trains is None:
        return state, None
    moved_to = published_from(run.config.model) if path is None else str(path)
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
    """Read parameters and model state of one checkpoint (None: the newest intact one) into the shardings of a model.

    The run may be training. `moved_to` is where the base of an adapter run is; None: where it was.
    """
    damaged = ""
    with Checkpointer(checkpoint_folder(run_dir), read_only=True) as checkpoints:
        if step is not None:
            return _restore(checkpoints, sharded_model, step, run_dir, moved_to)
        # Both parts must be of one step, so a damaged one is passed over here and not in the checkpointer.
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
    # The checkpoint itself says what it holds, and what has an average: no setting of the run need be known.
    wanted = sharded_model.abstract_params
    saved_names = {stored_name(name) for name in info.leaves}  # keys of a dict may hold `/` themselves
    if base is not None:
        wanted = select_leaves(wanted, lambda path: stored_name(f"params/{path}") in saved_names)
    averaged = {name for name in saved_names if is_inside(name, "ema")}
    model_state = checkpoints.restore(sharded_model.abstract_model_state, step=step, prefix="model_state")
    if not averaged:
        params = _read_params(checkpoints, wanted, info)
    else:
        ema, ema_state = average_shapes(sharded_model, lambda path: stored_name(f"ema/{path}") in averaged)
        params = checkpoints.restore(ema, step=step, prefix="ema")
        if len(jax.tree.leaves(ema)) < len(jax.tree.leaves(wanted)):  # frozen parameters have no average
            params = merge_leaves(params, _read_params(checkpoints, wanted, info))
        saved = checkpoints.restore(ema_state, step=step, prefix="ema_model_state")
        model_state = averaged_model_state(saved, model_state)
    if base is not None:
        own = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
        only = {"only": lambda path: path not in own}
        params = merge_leaves(params, restore_base(sharded_model, base, run_dir=run_dir, moved_to=moved_to, **only))
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
