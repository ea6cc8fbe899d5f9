"""Whether a run goes on from the newest checkpoint of its directory, and what may have changed since then."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.kept_weights import KEPT_WEIGHTS
from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.config.files import recorded_parts
from jaxtrain.config.secrets import redacted
from jaxtrain.errors import CheckpointError, ConfigError, DataError
from jaxtrain.metrics.runinfo import read_run_info
from jaxtrain.optim.evaluation import kept_nodes
from jaxtrain.run.own_parts import OwnParts, part_changes
from jaxtrain.train.assemble import Run
from jaxtrain.train.state import TrainState

RESUME_MODES = ("auto", "must", "never")
_GO_ON = "use another run_dir, resume='never' to start anew, or resume='must' to go on with the change"
_SET_BACK = "set it back, use another run directory, or start again with --resume never (from Python resume='never')"
# What may change without the trained numbers being others: where and how fast a run computes, and what it writes. Other
# data is noticed by its content, and more steps are how a run is made longer.
_SAME_TRAINING = (
    *(f"{group}." for group in ("data", "parallel", "remat", "checkpoint", "evaluation", "logging", "profile")),
    "checks.",
    "notices.",
    *(f"{key} " for key in ("name", "compilation_cache", "optimizer.offload", "model.attention")),
    *(f"train.{key} " for key in ("prefetch", "workers", "max_skipped_in_a_row")),
    *("loss.logits ", "loss.block ", "compiler_options", "watchdog"),
)
# Evaluations before and after a change of these cannot be compared, as early stopping and `keep_best` do.
_COMPARED = ("evaluation.max_batches ", "evaluation.early_stopping.metric ", "evaluation.early_stopping.mode ")
# Of the stream of batches, what the config says; the rest describes the data.
_BATCH_KEYS = {"seed": "seed", "global_batch_size": "train.global_batch_size"}


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def choose_start(checkpointer: Checkpointer, run_dir: Path, resume: str | None) -> int | None:
    """The step to resume, or None for a fresh start."""
    if resume is not None and resume not in RESUME_MODES:
        raise ConfigError(f"resume={resume!r}: use one of {', '.join(RESUME_MODES)}")
    # Process 0 decides for all: another may see an older listing of a network file system.
    found = from_process_0(lambda: -1 if (step := checkpointer.latest_step()) is None else step)
    if resume == "must" and found < 0:
        usual = run_dir / "checkpoints"  # as the user wrote it
        folder = usual if checkpointer.directory == usual.absolute() else checkpointer.directory
        raise CheckpointError(f"--resume must, but there is no checkpoint in {folder}; use auto")
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
    saved = checkpointer.metadata()
    changes = part_changes(saved, recorded_parts(current), run_dir)
    changes += config_changes(saved["config"], current["config"])
    check_stream(saved["stream"], current["stream"], run_dir=run_dir)
    config = current["config"]
    compared = [one for one in changes if one.startswith(_COMPARED) and not (".early_" in one and " None -> " in one)]
    if compared and (config["evaluation"]["early_stopping"] or config["checkpoint"]["keep_best"]):
        raise ConfigError(
            f"{', '.join(compared)}: early stopping and checkpoint.keep_best compare evaluations with those before; "
            f"{_SET_BACK}"
        )
    if not may_change:
        _check_same_training(changes, saved["config"], config, run_dir=run_dir)
    try:
        checkpointer.check_like(target)
    except CheckpointError as error:
        changed = f"changed since: {', '.join(changes[:3])}; " if changes else ""
        raise CheckpointError(f"{error}; {changed}{_SET_BACK}") from None
    return changes


def check_stream(saved: Mapping[str, Any], current: Mapping[str, Any], *, run_dir: Path) -> None:
    """Refuse to go on with other batches: batch k would hold other rows, or evaluations be of other rows."""
    keys = {name: key for name, key in _BATCH_KEYS.items() if name in saved and saved[name] != current.get(name)}
    if keys:
        shown = " and ".join(f"{key} {saved[name]} -> {current.get(name)}" for name, key in keys.items())
        raise ConfigError(
            f"{run_dir} holds a run with another configuration: {shown}, which no resume changes; {_SET_BACK}"
        )
    before, after = flat(saved), flat(current)
    differ = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    if differ:
        key = differ[0]
        how = "evaluated on other held-out rows" if key.startswith("validation.") else "trained on other data"
        raise DataError(f"the checkpoint was {how}: {key} was {before.get(key)!r}, is {after.get(key)!r}; {_SET_BACK}")


def config_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Keys that differ between two resolved configs, as `train.steps 600 -> 1200`; of a new kind, the kind alone."""
    before, after = flat(saved), flat(current)
    kinds = [key.removesuffix("kind") for key in after if key.endswith(".kind") and before.get(key) != after[key]]
    return [
        f"{key} {before.get(key)} -> {after.get(key)}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
        and not any(key.startswith(kind) and key != f"{kind}kind" for kind in kinds)
    ]


def _check_same_training(
    changes: list[str], saved: Mapping[str, Any], current: Mapping[str, Any], *, run_dir: Path
) -> None:
    """Refuse to go on with a run that trained something else: its old numbers would be returned as the new ones."""
    same = _SAME_TRAINING
    if current["train"]["steps"] >= saved["train"]["steps"]:
        same = (*same, "train.steps ")
    differ = [change for change in changes if not change.startswith(same)]
    if differ:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ConfigError(f"{run_dir} holds a run with another configuration: {', '.join(differ[:3])}{more}; {_GO_ON}")


def finished_row(run_dir: Path) -> dict[str, float | int | None]:
    """The training metrics of the last step, as run.json has them of a run that ended; empty where it has none."""
    final = read_run_info(run_dir).get("final") or {}
    return {name: value for name, value in final.items() if name != "wall_seconds" and not name.startswith("eval_")}
