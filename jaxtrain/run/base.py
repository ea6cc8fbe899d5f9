"""The base of an adapter run: found before step 0, and named in run.json and in the checkpoints, which leave it out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import DamagedError, read_info
from jaxtrain.checkpoint.places import Place
from jaxtrain.checkpoint.run_folder import find_checkpoint
from jaxtrain.config.published import published_from
from jaxtrain.config.store_address import is_store_address
from jaxtrain.interop.fresh import fresh_parts
from jaxtrain.interop.weights import is_published
from jaxtrain.train.assemble import Run
from jaxtrain.train.base import KEPT, BaseRecord, base_of, describe_base
from jaxtrain.train.own_step import OwnStep
from jaxtrain.train.state import TrainState, select_leaves
from jaxtrain.train.step import TrainStep


def stored_whole(step: TrainStep) -> bool:
    """Whether the checkpoints of a step hold every parameter; those of adapters leave out what is not trained."""
    adapted = step.model.adapted
    return adapted is None or adapted.lora is None


def trained_leaves(step: TrainStep) -> Callable[[str], bool] | None:
    """Parameter path -> whether checkpoints of this step hold it; None: they hold all."""
    return None if stored_whole(step) else step.program.settings.trainable


def start_of(run: Run, own_step: OwnStep) -> dict[str, Any]:
    """What `TrainStep.init` takes besides the seed: what the run starts from.

    Args:
        run: assembled.
        own_step: parts from Python.
    """
    given = {"params": own_step.params, "model_state": own_step.model_state, "skip": own_step.skip}
    published = published_from(run.config.model)
    if own_step.params is None and published is not None:
        given |= {"params": published, "skip": [*own_step.skip, *fresh_parts(run.config.model)]}
    if run.config.finetune.adapter is not None:
        given["adapter"] = run.config.finetune.adapter
    path = given["params"]
    if not stored_whole(run.step) and isinstance(path, str | Path) and not is_published(path):
        # The base of a run is one of its steps: the newest may be another one when it is asked for again.
        given["params"] = str(_newest_intact(path))
    return given


def _newest_intact(path: str | Path) -> Place:
    found = find_checkpoint(path)
    if found.step is not None:
        return found.directory / str(found.step)
    with Checkpointer(found.directory, read_only=True) as checkpointer:
        steps = checkpointer.steps()
    for step in reversed(steps):
        try:
            return read_info(found.directory, step).path
        except DamagedError:
            continue
    return found.directory


def describe_start(run: Run, state: TrainState, given: dict[str, Any]) -> BaseRecord | None:
    """The base of a run that starts, from its state at step 0; None where its checkpoints hold every parameter.

    Args:
        run: assembled.
        state: at step 0.
        given: from `start_of`.
    """
    trains = trained_leaves(run.step)
    if trains is None:
        return None
    path, skip, seed = given["params"], tuple(given["skip"]), run.config.seed
    if path is None:
        return describe_base(state.params, trains, format="drawn", path=None, seed=seed)
    if not isinstance(path, str | Path):
        return describe_base(state.params, trains, format="kept", path=None, seed=seed)
    place = str(path) if is_store_address(str(path)) else str(Path(path).absolute())
    if is_published(path):
        return describe_base(state.params, trains, format="published", path=place, seed=seed, skip=skip)
    found = find_checkpoint(path)
    assert found.step is not None
    below = base_of(read_info(found.directory, found.step).metadata)
    if below is None:
        return describe_base(state.params, trains, format="run", path=place, seed=seed, skip=skip)
    own = describe_base(state.params, trains, format=below.format, path=below.path, seed=below.seed, skip=below.skip)
    # Adapters of another adapter run: the same base, unless something that was trained there is frozen here.
    if below.format != "kept" and own.digests.items() <= below.digests.items():
        return own
    return describe_base(state.params, trains, format="kept", path=None, seed=seed)


def keep_base(record: BaseRecord | None, run: Run, state: TrainState, run_dir: Path) -> None:
    """Write a base that nothing else has into the run; every process calls this.

    Args:
        record: from `describe_start`.
        run: assembled.
        state: at step 0.
        run_dir: directory of the run.
    """
    trains = trained_leaves(run.step)
    if record is None or record.format != "kept" or trains is None:
        return
    frozen = select_leaves(state.params, lambda path: not trains(path))
    with Checkpointer(run_dir / KEPT) as checkpointer:
        checkpointer.save(0, {"params": frozen}, metadata={})


def moved_base(run: Run, own_step: OwnStep) -> str | None:
    """Where a run that goes on is told to find its base; None: where it was."""
    if isinstance(own_step.params, str | Path):
        return str(own_step.params)
    return published_from(run.config.model) if own_step.params is None else None
