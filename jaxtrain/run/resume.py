"""Where a run starts: from nothing, or from the newest checkpoint of its directory."""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.kept_weights import KEPT_WEIGHTS
from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.checkpoint.tree import flatten, is_inside
from jaxtrain.config.files import recorded_parts
from jaxtrain.config.secrets import redacted
from jaxtrain.data.special import SETTINGS_FILE
from jaxtrain.errors import CheckpointError, ConfigError, DataError
from jaxtrain.metrics.runinfo import read_run_info
from jaxtrain.metrics.time_spent import RESTARTS_FILE
from jaxtrain.optim.evaluation import kept_nodes
from jaxtrain.run.agreed import flat
from jaxtrain.run.called_sources import called_sources
from jaxtrain.run.changed_state import saved_leaves
from jaxtrain.run.kept_tokenizer import COPY_FILE
from jaxtrain.run.own_parts import OwnParts, check_given_again, part_changes
from jaxtrain.runtime.host import attempt
from jaxtrain.train.assemble import Run
from jaxtrain.train.base import KEPT
from jaxtrain.train.state import TrainState

RESUME_MODES = ("auto", "must", "never")
GO_ON = "use another run_dir, resume='never' to start anew, or resume='must' to go on with the change"
"""What works where a run trained something else, and its state is that of the run that would go on."""
_SHAPES_STATE = {
    "precision.policy",
    *(f"optimizer.{key}" for key in ("kind", "moments", "momentum", "b1", "ema_decay", "freeze", "adamw", "groups")),
    "optimizer.min_dim_size_to_factor",
}
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
# What identifies rows that were given for evaluation, in the description of the data.
_HELD_OUT = "validation."
# Of the stream of batches, what the config says; the rest describes the data.
_BATCH_KEYS = {"seed": "seed", "global_batch_size": "train.global_batch_size"}
_SHAPES_NOTHING = {
    f"model.{key}" for key in ("attention", "attention_softcap", "causal", "dropout", "size", "sliding_window")
}


def choose_start(checkpointer: Checkpointer, run_dir: Path, resume: str | None) -> int | None:
    """The step to resume, or None for a fresh start.

    Args:
        checkpointer: of the run directory.
        run_dir: for messages.
        resume: auto (if there is a checkpoint), must, or never; None as auto.

    Raises:
        ConfigError: unknown mode.
        CheckpointError: `must` without a checkpoint.
    """
    if resume is not None and resume not in RESUME_MODES:
        raise ConfigError(f"--resume {resume}: use one of {', '.join(RESUME_MODES)}")
    # Process 0 decides for all: another may see an older listing of a network file system.
    found = from_process_0(lambda: -1 if (step := checkpointer.latest_step()) is None else step)
    latest = None if found < 0 else found
    if resume == "must" and latest is None:
        usual = run_dir / "checkpoints"  # as the user wrote it
        folder = usual if checkpointer.directory == usual.absolute() else checkpointer.directory
        raise CheckpointError(f"--resume must, but there is no checkpoint in {folder}; use auto")
    return None if resume == "never" else latest


def run_metadata(run: Run, own: OwnParts) -> dict[str, Any]:
    """What a checkpoint says of its run: config, which rows batch k holds, parts from Python, files of functions."""
    return {
        "name": run.name,
        "config": redacted(run.config.model_dump(mode="json")),
        "stream": json.loads(json.dumps(run.stream)),
        "from_python": own,
        "called": called_sources(run.config, own),
        KEPT_WEIGHTS: kept_nodes(run.step.abstract_state.optimizer_state),
    }


def check_resumed(
    checkpointer: Checkpointer, target: TrainState, current: Mapping[str, Any], *, run_dir: Path, may_change: bool
) -> list[str]:
    """What changed since the newest checkpoint, once it is known that this run can go on from it.

    Args:
        checkpointer: holds a checkpoint.
        target: the state of this run as shapes; no array is read, and nothing has to be compiled.
        current: `run_metadata` of this run.
        run_dir: for messages.
        may_change: whether another configuration may go on.

    Raises:
        ConfigError, DataError: see `changes_since`.
        CheckpointError: the checkpoint is of another model or optimizer; names the settings that were changed.
    """
    other = None
    try:
        checkpointer.check_like(target)
    except CheckpointError as error:
        other = error
    saved, ways, weights = checkpointer.metadata(), GO_ON, ","
    if other is not None or saved.get("stream", {}) != current["stream"]:
        weights = _with_weights(checkpointer, target, current, run_dir=run_dir)
    if other is not None:
        anew = f"set it back, use another run_dir{weights} or resume='never' to start anew"
        ways = f"the state then has another form, so no resume can go on; {anew}"
    changes = changes_since(saved, current, run_dir=run_dir, may_change=may_change, ways=ways, weights=weights)
    if other is not None:
        found = state_changes(changes)
        back = f"; changed since: {', '.join(found[:3])}; set that back," if found else ";"
        raise CheckpointError(f"{other}{back} use another --run-dir{weights} or start again with --resume never")
    return changes


def _with_weights(checkpointer: Checkpointer, target: TrainState, current: Mapping[str, Any], *, run_dir: Path) -> str:
    """How a run in another directory starts from the weights of this one, as a clause; a comma where it cannot."""
    # Weights are given to `fit`, as the model is; they are cast, and those below an adapter are elsewhere.
    if recorded_parts(current)["model"] is None or checkpointer.metadata().get("base") is not None:
        return ","
    wanted = {name: tuple(leaf.shape) for name, leaf in flatten(target.params, prefix="params").leaves.items()}
    leaves = saved_leaves(checkpointer).items()
    is_same = wanted == {name: tuple(shape) for name, (shape, _) in leaves if is_inside(name, "params")}
    return f", where params='{run_dir}' starts from its weights," if is_same else ","


def recorded_save(run_dir: Path) -> int:
    """The step of the newest save that run.json names, which may not have been completed; 0: it names none."""
    saves = read_run_info(run_dir).get("saves")
    steps = [save.get("step") for save in saves if isinstance(save, dict)] if isinstance(saves, list) else []
    return max((step for step in steps if isinstance(step, int)), default=0)


def set_aside(run_dir: Path) -> Path | None:
    """Move what an earlier run left in the directory to `previous/<time>/`; None where there was nothing."""
    names = ("checkpoints", "metrics.jsonl", "tensorboard", "run.json", "report.html", "sample.txt", "tokenizer.json")
    # Rows of this supervisor's are of this run, whose first start did not live to its first save.
    restarts = () if attempt() else (RESTARTS_FILE,)
    more = (
        "held_out.json",
        "rows.json",
        "reference.npz",
        "profile",
        "nonfinite",
        "trackers",
        COPY_FILE,
        SETTINGS_FILE,
        KEPT,
        *restarts,
    )
    old = [run_dir / name for name in (*names, *more) if (run_dir / name).exists()]
    if not old:
        return None
    # Nanoseconds, since two runs can be set aside within a second; the names sort by time.
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(seconds))}-{nanoseconds:09d}"
    folder = run_dir / "previous" / name
    folder.mkdir(parents=True, exist_ok=False)
    for path in old:
        path.rename(folder / path.name)
    return folder


def finished_row(run_dir: Path) -> dict[str, float | int | None]:
    """The training metrics of the last step, as run.json has them of a run that ended; empty where it has none."""
    final = read_run_info(run_dir).get("final")
    return {
        name: value for name, value in (final or {}).items() if name != "wall_seconds" and not name.startswith("eval_")
    }


def _set_back(weights: str = ",") -> str:
    """What works where no resume goes on; the clause of `_with_weights` is a part of it."""
    anew = "start again with --resume never (from Python resume='never')"
    return f"set it back, use another run directory{weights} or {anew}"


def check_stream(saved: Mapping[str, Any], current: Mapping[str, Any], *, weights: str = ",") -> None:
    """Refuse to go on with other data: batch k would hold other rows than it did, or evaluations be of other rows.

    Args:
        saved, current: which rows batch k holds, in the run of a checkpoint and in the one that would go on.
        weights: how another run starts from the weights, for messages.

    Raises:
        DataError: names what differs.
    """
    before, after = flat(saved), flat(current)
    differ = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    if differ:
        key = differ[0]
        more = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
        how = "evaluated on other held-out rows" if key.startswith(_HELD_OUT) else "trained on other data"
        raise DataError(
            f"the checkpoint was {how}: {key} was {before.get(key)!r}, is {after.get(key)!r}{more}; "
            f"{_set_back(weights)}"
        )


def _check_batches(saved: Mapping[str, Any], current: Mapping[str, Any], *, run_dir: Path, weights: str) -> None:
    """Refuse another seed or batch size, with which batch k would hold other rows of the same data."""
    differ = [
        f"{key} {saved[name]} -> {current.get(name)}"
        for name, key in _BATCH_KEYS.items()
        if name in saved and saved[name] != current.get(name)
    ]
    if differ:
        raise ConfigError(
            f"{run_dir} holds a run with another configuration: {' and '.join(differ)}, which no resume "
            f"changes; {_set_back(weights)}"
        )


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


def changes_since(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    run_dir: Path,
    may_change: bool,
    ways: str = GO_ON,
    weights: str = ",",
) -> list[str]:
    """What differs between the run of a checkpoint and the one that would go on from it.

    Args:
        saved: metadata of the checkpoint: `config`, `stream` (which rows batch k holds) and `from_python`.
        current: the same of the run that would go on.
        run_dir: for messages.
        may_change: whether another configuration may go on.
        ways: what works where it may not, for messages.
        weights: how a run in another directory starts from the weights, for messages; a comma: it cannot.

    Returns:
        The changes, each as `train.steps 600 -> 1200`.

    Raises:
        ConfigError: a part from Python is not given again, the configuration changed and may not, or seed or batch size
            changed, which never may.
        DataError: the data differs.
    """
    parts = recorded_parts(current)
    check_given_again(saved, parts, run_dir)
    before, after = saved.get("config", {}), current["config"]
    changes = [*part_changes(saved, parts), *config_changes(before, after)]
    _check_batches(saved.get("stream", {}), current["stream"], run_dir=run_dir, weights=weights)
    check_stream(saved.get("stream", {}), current["stream"], weights=weights)
    # After the batches, since it offers to go on with the change, and no change of them is gone on with.
    if not may_change:
        check_same_training(changes, before, after, run_dir=run_dir, ways=ways)
    return changes


def check_same_training(
    changes: Iterable[str], saved: Mapping[str, Any], current: Mapping[str, Any], *, run_dir: Path, ways: str
) -> None:
    """Refuse to go on with a run that trained something else: its old numbers would be returned as the new ones.

    Args:
        changes: from `config_changes`, and of parts that came from Python.
        saved, current: the two resolved configs.
        run_dir: for messages.
        ways: what works, for messages.

    Raises:
        ConfigError: names the first keys that differ and what to do.
    """
    before, after = (config.get("train", {}).get("steps", 0) for config in (saved, current))
    differ = [change for change in changes if not change.startswith(_SAME_TRAINING)]
    if after >= before:
        differ = [change for change in differ if not change.startswith("train.steps ")]
    if differ:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ConfigError(f"{run_dir} holds a run with another configuration: {', '.join(differ[:3])}{more}; {ways}")


def state_changes(changes: Iterable[str]) -> list[str]:
    """Of what `config_changes` gives, that which may change names, shapes or dtypes of the state."""
    return [
        change
        for change in changes
        if (key := change.partition(" ")[0]) in _SHAPES_STATE
        or key.startswith(("optimizer.call", "optimizer.args", "finetune"))
        or (key.startswith("model.") and key not in _SHAPES_NOTHING)
    ]
