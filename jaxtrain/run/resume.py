"""What may have changed since the checkpoint that a run resumes: settings, data, parts from Python, code."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.config.files import recorded_parts
from jaxtrain.config.secrets import redacted
from jaxtrain.data.configured import BATCH_KEYS
from jaxtrain.errors import CheckpointError, ConfigError, DataError
from jaxtrain.metrics.history import flat
from jaxtrain.run.assemble import Run
from jaxtrain.run.code import PARTS
from jaxtrain.run.start import trained_leaves
from jaxtrain.train.step import TrainStep
from jaxtrain.weights.base import without_base

_GO_ON = (
    "use another run_dir, resume='never' (--resume never) to start anew, or resume='must' (--resume must) to resume "
    "with the change"
)
_SET_BACK = "set it back, use another run directory, or start again with --resume never (from Python resume='never')"
# Settings outside the program of a step. Other data is noticed by its content.
_OUTSIDE_THE_STEP = (
    "data",
    "checkpoint",
    "evaluation",
    "logging",
    "profile",
    "watchdog",
    "name",
    "compilation_cache",
    "compiler_options",
    "train.prefetch",
    "train.workers",
    "train.max_skipped_in_a_row",
)
# Settings that may change without changing the trained numbers: where and how fast a run computes, and what it writes.
MAY_CHANGE = (
    *_OUTSIDE_THE_STEP,
    "parallel",
    "remat",
    "optimizer.offload",
    "model.attention",
    "loss.logits",
    "loss.block",
)
# More steps make a run longer.
_MAY_GROW = (*MAY_CHANGE, "train.steps")
# Evaluations before and after a change of these cannot be compared, as early stopping and `keep_best` do.
_COMPARED = ("evaluation.max_batches", "task", "loss.label_smoothing", "loss.beta")
_COMPARED_BY_EARLY_STOPPING = ("evaluation.early_stopping.metric", "evaluation.early_stopping.mode")
# Parts from Python that a run must be given again when it resumes. Other data is noticed by its content.
_GIVEN_AGAIN = ("model", "task", "optimizer")


def is_within(key: str, names: Sequence[str]) -> bool:
    """Return whether a dotted key is one of the names, or in a group of such a name."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def choose_start(checkpointer: Checkpointer, resume: str | None) -> int | None:
    """Return the step to resume, or None for a fresh start.

    Raises:
        CheckpointError: `resume` is must and there is no checkpoint.
    """

    def latest_step() -> int:
        step = checkpointer.latest_step()
        return -1 if step is None else step

    # Process 0 decides for all: another may see an older listing of a network file system.
    step = from_process_0(latest_step)
    if step >= 0 and resume != "never":
        return step
    if resume == "must":
        raise CheckpointError(f"--resume must, but there is no checkpoint in {checkpointer.directory}; use auto")
    return None


def run_metadata(run: Run) -> dict[str, Any]:
    """Return what a checkpoint records of its run: config, which rows batch k holds, names of parts from Python."""
    spec = run.spec
    return {
        "name": spec.loaded.name,
        "config": redacted(run.config.model_dump(mode="json")),
        "stream": json.loads(json.dumps(run.stream)),
        "from_python": {
            "model": None if spec.model is None else spec.model.name,
            "task": None if spec.task is None else spec.task.name,
            "data": None if spec.data is None else next(iter(spec.data.description), "data"),
            "optimizer": None if spec.optimizer is None else "optax",
        },
    }


def run_identity(metadata: Mapping[str, Any]) -> str:
    """Return a digest of what makes a run the same on every machine: its name, config and data."""
    config = {key: value for key, value in flat(metadata["config"]).items() if not is_within(key, _MAY_GROW)}
    content = [metadata["name"], config, metadata["stream"]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_resumed(
    checkpointer: Checkpointer, step: TrainStep, current: Mapping[str, Any], *, run_dir: Path, may_change: bool
) -> dict[str, str]:
    """Return what changed since the newest checkpoint, key -> `train.steps 600 -> 1200`, if this run may resume it.

    Raises:
        ConfigError: a setting changed that would change the numbers (unless `may_change`), or what evaluations measure.
        DataError: the data changed.
        CheckpointError: the state of the step has other leaves.
    """
    saved = checkpointer.metadata()
    before = saved["config"]
    after = current["config"]
    _check_parts(saved, current, run_dir)
    check_stream(saved["stream"], current["stream"], run_dir=run_dir)
    texts = config_changes(before, after)
    if after["evaluation"]["early_stopping"] or after["checkpoint"]["keep_best"]:
        compared = _COMPARED
        if before["evaluation"]["early_stopping"]:
            compared += _COMPARED_BY_EARLY_STOPPING
        refused = [text for key, text in texts.items() if is_within(key, compared)]
        if refused:
            raise ConfigError(f"{', '.join(refused)}: evaluations before and after could not be compared; {_SET_BACK}")
    if not may_change:
        # A shorter run would return the numbers of the longer one.
        allowed = _MAY_GROW if after["train"]["steps"] >= before["train"]["steps"] else MAY_CHANGE
        refused = [text for key, text in texts.items() if not is_within(key, allowed)]
        if refused:
            more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
            raise ConfigError(
                f"{run_dir} holds a run with another configuration: {', '.join(refused[:3])}{more}; {_GO_ON}"
            )
    try:
        checkpointer.check_like(without_base(step.abstract_state, trained_leaves(step)))
    except CheckpointError as error:
        cause = f"changed since: {', '.join([*texts.values()][:3])}; " if texts else ""
        raise CheckpointError(f"{error}; {cause}{_SET_BACK}") from None
    return texts


def check_code(
    saved: Mapping[str, Any], current: Mapping[str, Any], changes: Mapping[str, str], *, run_dir: Path, may_change: bool
) -> str:
    """Compare the code of a run that resumes with that of its checkpoint, and return a text on config and code.

    Digests are comparable only if nothing else changes the program of a step: no settings (`changes` is what
    `check_resumed` returned), devices, layout or versions. A change of `train.steps` changes the schedule, and with it
    the program of the config's optimizer, but of no other part.

    Raises:
        ConfigError: the code is another one, and `may_change` is False.
    """
    texts = [*changes.values()][:5]
    same = f"same config except {', '.join(texts)}" if texts else "same config"
    before = saved.get("code")
    after = current["code"]
    changes_step = any(not is_within(key, (*_OUTSIDE_THE_STEP, "train.steps")) for key in changes)
    if changes_step or before is None or before["conditions"] != after["conditions"]:
        return f"{same} (code not compared)"
    compared = "step"
    parts = [*PARTS]
    if "train.steps" in changes and current["from_python"]["optimizer"] is None:
        compared = "gradients"
        parts.remove("optimizer")
    if before[compared] == after[compared]:
        return f"{same}, same code"
    parts = [part for part in parts if before[part] != after[part]]
    cause = f"the code of the {' and '.join(parts) or 'step'} changed"
    if may_change:
        return ", ".join([cause, *texts])
    raise ConfigError(f"{cause} since {run_dir} was trained; {_GO_ON}")


def check_stream(saved: Mapping[str, Any], current: Mapping[str, Any], *, run_dir: Path) -> None:
    """Raise an error if a resumed run would train batch k on other rows, or evaluate other rows."""
    before = flat(saved)
    after = flat(current)
    for key in (*BATCH_KEYS, *sorted(before.keys() | after.keys())):
        old = before.get(key)
        new = after.get(key)
        if old == new:
            continue
        if key in BATCH_KEYS:
            raise ConfigError(
                f"{run_dir} holds a run with another configuration: {key} {old} -> {new}, which no resume changes; "
                f"{_SET_BACK}"
            )
        use = "evaluated on other held-out rows" if key.startswith("validation.") else "trained on other data"
        raise DataError(f"the checkpoint was {use}: {key} was {old!r}, is {new!r}; {_SET_BACK}")


def config_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """Return key -> `key old -> new` where two resolved configs differ; of a group of a new kind, the kind alone."""
    before = flat(saved)
    after = flat(current)
    keys = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    groups = [key.removesuffix(".kind") for key in keys if key.endswith(".kind")]
    return {
        key: f"{key} {before.get(key)} -> {after.get(key)}"
        for key in keys
        if key.endswith(".kind") or not is_within(key, groups)
    }


def _check_parts(saved: Mapping[str, Any], current: Mapping[str, Any], run_dir: Path) -> None:
    before = recorded_parts(saved)
    after = recorded_parts(current)
    for part in _GIVEN_AGAIN:
        if before[part] is not None and after[part] is None:
            raise ConfigError(
                f"the run in {run_dir} was trained with its {part} from Python ({before[part]}): call "
                f"jt.run_config(..., {part}=...) with it (or jt.fit, if that made the run), use another run "
                "directory, or start again with resume never"
            )
