"""Whether a run goes on from the newest checkpoint of its directory, what may have changed, and which batches follow.

Batch numbers are a pure function of the steps and the recorded roll backs: a run that is resumed reads the batches that
an undisturbed one reads. A kill before the first checkpoint of a new line resumes the old line and goes back once more.

Source of roll backs: Chowdhery et al. 2022 (PaLM), section 5.1, which restarts about 100 steps before a spike and skips
200 to 500 batches.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.kept_weights import KEPT_WEIGHTS
from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.config.files import recorded_parts
from jaxtrain.config.secrets import redacted
from jaxtrain.errors import CheckpointError, ConfigError, DataError
from jaxtrain.metrics.runinfo import read_run_info
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
RECORD = "rolled_back"
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
# What a run asks to be given again; other data is noticed by its content.
_GIVEN_AGAIN = ("model", "task", "optimizer")


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
    # A run that trained something else would return its old numbers as the new ones.
    is_longer = config["train"]["steps"] >= saved["config"]["train"]["steps"]
    differ = [one for one in changes if not one.startswith((*_SAME_TRAINING, *(["train.steps "] if is_longer else [])))]
    if differ and not may_change:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ConfigError(f"{run_dir} holds a run with another configuration: {', '.join(differ[:3])}{more}; {_GO_ON}")
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


def finished_row(run_dir: Path) -> dict[str, float | int | None]:
    """The training metrics of the last step, as run.json has them of a run that ended; empty where it has none."""
    final = read_run_info(run_dir).get("final") or {}
    return {name: value for name, value in final.items() if name != "wall_seconds" and not name.startswith("eval_")}


def own_parts(
    *, model: "Model | None", task: "Task | None", data: "Data | None", optimizer_state: Any = None
) -> OwnParts:
    """The record for `run.json` and checkpoints: part -> the name of what was passed in; None: the config's."""
    return {
        "model": None if model is None else model.name,
        "task": None if task is None else task.name,
        "data": None if data is None else next(iter(data.description), "data"),
        "optimizer": None if optimizer_state is None else _optimizer_name(optimizer_state),
    }


def _optimizer_name(state: Any) -> str:
    names = dict.fromkeys(name.removesuffix("State") for name in _state_names(state))
    return ", ".join(name for name in names if name not in ("Empty", "Masked", "MaskedNode")) or "without state"


def _state_names(state: Any) -> Iterator[str]:
    if isinstance(state, tuple) and type(state) is not tuple:
        yield type(state).__name__
    if isinstance(state, (tuple, list, Mapping)):
        for part in state.values() if isinstance(state, Mapping) else state:
            yield from _state_names(part)


def part_changes(record: Mapping[str, Any], given: OwnParts, run_dir: Path) -> list[str]:
    """Model, task and optimizer that differ from those of the record by name, as `task classification -> brier`."""
    saved = recorded_parts(record)
    for part in _GIVEN_AGAIN:
        if saved[part] is not None and given[part] is None:
            raise ConfigError(
                f"the run in {run_dir} was trained with {'an' if part == 'optimizer' else 'a'} {part} from Python "
                f"({saved[part]}) and would go on with the config's: call jt.run_config(..., {part}=...) with it (or "
                "jt.fit, if that made the run), use another run directory, or start again with resume never"
            )
    return [
        f"{part} {saved[part] or 'of the config'} -> {given[part] or 'of the config'}"
        for part in _GIVEN_AGAIN
        if saved[part] != given[part]
    ]


@dataclass(frozen=True)
class RollBack:
    """One time that a run went back.

    Attributes:
        from_step: the step that was a spike.
        to_step: the step whose checkpoint was restored.
        first_batch: number of the first batch that was left out.
        num_batches: batches that were left out.
        loss, grad_norm: of the spike.
    """

    from_step: int
    to_step: int
    first_batch: int
    num_batches: int
    loss: float
    grad_norm: float


class SpikeError(Exception):
    """A step was a spike, and the run goes back; caught inside the run."""

    def __init__(self, step: int, loss: float, grad_norm: float, *, to_step: int) -> None:
        super().__init__(step, loss, grad_norm)
        self.step, self.loss, self.grad_norm, self.to_step = step, loss, grad_norm, to_step


def recorded(metadata: Mapping[str, Any]) -> tuple[RollBack, ...]:
    """The roll backs of a run, in their order, as the metadata of a checkpoint has them."""
    return tuple(RollBack(**one) for one in metadata.get(RECORD, ()))


def batch_of(k: int, rolled_back: Sequence[RollBack]) -> int:
    """The number of the batch that is read after k steps.

    A roll back moves all later steps past the batches that it leaves out, until one to an earlier step takes its place.
    """
    return k + sum(
        one.num_batches
        for i, one in enumerate(rolled_back)
        if one.to_step <= k and all(later.to_step >= one.to_step for later in rolled_back[i + 1 :])
    )


def with_spike(metadata: Mapping[str, Any], spike: SpikeError, *, skip_batches: int) -> dict[str, Any]:
    """The entry of the metadata that records the roll backs, with one more."""
    rolled_back, step = recorded(metadata), spike.to_step
    # Of a roll back to a later step nothing stays in the new line: its batches are in the range of this one.
    first = batch_of(step, [one for one in rolled_back if one.to_step <= step])
    count = max(skip_batches, batch_of(spike.step - 1, rolled_back) + 1 - first)
    done = RollBack(spike.step, step, first, count, spike.loss, spike.grad_norm)
    return {RECORD: [dataclasses.asdict(one) for one in (*rolled_back, done)]}
