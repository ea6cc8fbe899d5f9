"""Whether a run goes on from the newest checkpoint of its directory, and what may have changed since."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.kept_weights import KEPT_WEIGHTS
from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.config.files import recorded_parts
from jaxtrain.config.secrets import redacted
from jaxtrain.errors import CheckpointError, ConfigError, DataError
from jaxtrain.metrics.history import flat
from jaxtrain.optim.wrappers import kept_nodes
from jaxtrain.train.assemble import Run
from jaxtrain.train.state import TrainState

if TYPE_CHECKING:
    from jaxtrain.data import Data
    from jaxtrain.models.model import Model
    from jaxtrain.models.task import Task

OwnParts = dict[str, str | None]
RESUME_MODES = ("auto", "must", "never")
_GO_ON = "use another run_dir, resume='never' to start anew, or resume='must' to go on with the change"
_SET_BACK = "set it back, use another run directory, or start again with --resume never (from Python resume='never')"
# What may change without the trained numbers being others: where and how fast a run computes, and what it writes. Other
# data is noticed by its content, and more steps are how a run is made longer.
MAY_CHANGE = (
    *("data", "parallel", "remat", "checkpoint", "evaluation", "logging", "profile", "checks", "watchdog"),
    *("name", "compilation_cache", "compiler_options", "optimizer.offload", "model.attention", "loss.logits"),
    *("loss.block", "train.prefetch", "train.workers", "train.max_skipped_in_a_row"),
)
# Evaluations before and after a change of these cannot be compared, as early stopping and `keep_best` do.
_COMPARED = ("evaluation.max_batches", "evaluation.early_stopping.metric", "evaluation.early_stopping.mode")
# What the stream of batches has of the config; the rest of it describes the data.
_BATCH_KEYS = ("seed", "global_batch_size")
# What a run asks to be given again; other data is noticed by its content.
_GIVEN_AGAIN = ("model", "task", "optimizer")


def is_within(key: str, names: Sequence[str]) -> bool:
    """Whether a dotted key is one of the names, or in a group of such a name."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def choose_start(checkpointer: Checkpointer, resume: str | None) -> int | None:
    """The step to resume, or None for a fresh start."""
    if resume is not None and resume not in RESUME_MODES:
        raise ConfigError(f"resume={resume!r}: use one of {', '.join(RESUME_MODES)}")
    # Process 0 decides for all: another may see an older listing of a network file system.
    found = from_process_0(lambda: -1 if (step := checkpointer.latest_step()) is None else step)
    if resume == "must" and found < 0:
        raise CheckpointError(f"--resume must, but there is no checkpoint in {checkpointer.directory}; use auto")
    return None if resume == "never" or found < 0 else found


def run_metadata(run: Run, own: OwnParts) -> dict[str, Any]:
    """What a checkpoint says of its run: config, which rows batch k holds, parts from Python."""
    return {
        "name": run.name,
        "config": redacted(run.config.model_dump(mode="json")),
        "stream": json.loads(json.dumps(run.stream)),
        "from_python": own,
        KEPT_WEIGHTS: kept_nodes(run.step.abstract_state.optimizer_state),
    }


def check_resumed(
    checkpointer: Checkpointer, target: TrainState, current: Mapping[str, Any], *, run_dir: Path, may_change: bool
) -> list[str]:
    """What changed since the newest checkpoint, each as `train.steps 600 -> 1200`, once this run can go on from it."""
    saved, config = checkpointer.metadata(), current["config"]
    changes = part_changes(saved, recorded_parts(current), run_dir) | config_changes(saved["config"], config)
    check_stream(saved["stream"], current["stream"], run_dir=run_dir)
    shown = [f"{key} {before} -> {after}" for key, (before, after) in changes.items()]
    compares = config["evaluation"]["early_stopping"] or config["checkpoint"]["keep_best"]
    # The group of early stopping is None where there is none: one that begins compares with nothing before it.
    others = [key for key, (before, _) in changes.items() if key in _COMPARED and (before or "early" not in key)]
    if compares and others:
        raise ConfigError(
            f"{', '.join(text for text in shown if text.startswith(tuple(others)))}: early stopping and "
            f"checkpoint.keep_best compare evaluations with those before; {_SET_BACK}"
        )
    # A run that trained something else would return its old numbers as the new ones.
    is_longer = config["train"]["steps"] >= saved["config"]["train"]["steps"]
    allowed = (*MAY_CHANGE, "train.steps") if is_longer else MAY_CHANGE
    differ = [text for key, text in zip(changes, shown, strict=True) if not is_within(key, allowed)]
    if differ and not may_change:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ConfigError(f"{run_dir} holds a run with another configuration: {', '.join(differ[:3])}{more}; {_GO_ON}")
    try:
        checkpointer.check_like(target)
    except CheckpointError as error:
        changed = f"changed since: {', '.join(shown[:3])}; " if shown else ""
        raise CheckpointError(f"{error}; {changed}{_SET_BACK}") from None
    return shown


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


def own_parts(
    *, model: "Model | None", task: "Task | None", data: "Data | None", optimizer_state: Any = None
) -> OwnParts:
    """The record for `run.json` and checkpoints: part -> the name of what was passed in; None: the config's."""
    # The types of an optax state name the transformations: `namedtuple[ScaleByLionState]`.
    states = re.findall(r"namedtuple\[(\w+?)(?:State)?\]", str(jax.tree.structure(optimizer_state)))
    names = [name for name in dict.fromkeys(states) if name not in ("Empty", "Masked", "MaskedNode")]
    return {
        "model": None if model is None else model.name,
        "task": None if task is None else task.name,
        "data": None if data is None else next(iter(data.description), "data"),
        "optimizer": None if optimizer_state is None else ", ".join(names) or "without state",
    }


def part_changes(record: Mapping[str, Any], given: OwnParts, run_dir: Path) -> dict[str, tuple[Any, Any]]:
    """Model, task and optimizer that differ from those of the record by name, as part -> names before and after."""
    saved = recorded_parts(record)
    for part in _GIVEN_AGAIN:
        if saved[part] is not None and given[part] is None:
            raise ConfigError(
                f"the run in {run_dir} was trained with {'an' if part == 'optimizer' else 'a'} {part} from Python "
                f"({saved[part]}): call jt.run_config(..., {part}=...) with it (or jt.fit, if that made the run), use "
                "another run directory, or start again with resume never"
            )
    return {
        part: (saved[part] or "of the config", given[part] or "of the config")
        for part in _GIVEN_AGAIN
        if saved[part] != given[part]
    }
