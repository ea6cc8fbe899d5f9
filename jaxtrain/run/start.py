"""The state that a run begins or resumes with, and the frozen base below its adapters."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import list_steps
from jaxtrain.checkpoint.run_folder import find_checkpoint
from jaxtrain.config.arguments import is_store_address
from jaxtrain.config.fits import check_fits, fresh_notes, fresh_parts
from jaxtrain.config.model import published_from
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.families.family import label_names
from jaxtrain.formats.hub import is_published, read_published_config
from jaxtrain.run.assemble import Run
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep
from jaxtrain.weights.base import BaseRecord, base_of, describe_base, with_base, without_base
from jaxtrain.weights.load import restore_base


def trained_leaves(step: TrainStep) -> Callable[[str], bool] | None:
    """Return parameter path -> whether checkpoints hold it, or None if they hold all, as without an adapter."""
    adapted = step.model.adapted
    if adapted is None or adapted.lora is None:
        return None
    return step.program.settings.trainable


def start_notes(run: Run) -> list[str]:
    """Return lines about a published model that a run of a config begins with.

    Raises:
        ConfigError: adapters beside random weights, a key that does not fit the published weights, or a head whose
            classes are in another order.
    """
    spec = run.spec
    if spec.model is not None:
        return []
    model = run.config.model
    # A function of the user may bring weights along.
    if run.config.finetune.lora is not None and published_from(model) is None and model.kind != "called":
        raise ConfigError(
            "finetune.lora trains adapters beside weights that are there already, and this model starts from random "
            "ones; set model.from to a published model, or leave the group finetune out to train all weights"
        )
    check_fits(model)
    if spec.params is None and not spec.skip:
        check_class_order(run.config, (run.data.reading or {}).get("classes"))
    return fresh_notes(model)


def check_class_order(config: Config, classes: Sequence[str] | None) -> None:
    """Raise if a published head that a run begins with has the classes of its data in another order."""
    path = published_from(config.model)
    if path is None or classes is None or config.finetune.adapter is not None or fresh_parts(config.model):
        return
    names = list(label_names(read_published_config(Path(path))) or [])
    if list(classes) != names and sorted(classes) == sorted(names):
        raise ConfigError(
            f"the head of {path} numbers its classes {', '.join(names[:3])}, ..., but the data "
            f"{', '.join(classes[:3])}, ...; write them as numbers (0 for {names[0]}, 1 for {names[1]}, ...)"
        )


def start_of(run: Run) -> dict[str, Any]:
    """Return the arguments of `load_weights` besides the step: what the run begins with.

    Raises:
        ConfigError: arrays for the base of adapters, which checkpoints could not name.
    """
    spec = run.spec
    source = spec.params
    skip = [*spec.skip]
    published = published_from(run.config.model)
    if source is None and published is not None:
        source = published
        skip += fresh_parts(run.config.model)
    if source is not None and trained_leaves(run.step) is not None:
        source = _lasting(source)
    return {"source": source, "model_state": spec.model_state, "skip": skip, "adapter": run.config.finetune.adapter}


def _lasting(source: Any) -> str:
    """Return the path of weights that stay where they are: of a run, that of the step that is its newest now."""
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            "checkpoints of adapters name their base weights, but params= are arrays; give the path of a run, of a "
            "checkpoint that holds them, or of a published folder"
        )
    source = os.fspath(source)
    if is_published(source):
        return source
    checkpoint = find_checkpoint(source)
    step = checkpoint.step
    if step is None:
        step = list_steps(checkpoint.directory)[-1]
    return str(checkpoint.directory / str(step))


def describe_start(run: Run, state: TrainState, start: Mapping[str, Any]) -> BaseRecord | None:
    """Return the base of a run that begins, from its state at step 0, or None if checkpoints hold every parameter."""
    trains = trained_leaves(run.step)
    if trains is None:
        return None
    path = start["source"]
    seed = run.config.seed
    if path is None:
        return describe_base(state.params, trains, format="drawn", path=None, seed=seed)
    format = "published" if is_published(path) else "run"
    if not is_store_address(path):
        path = str(Path(path).absolute())
    return describe_base(state.params, trains, format=format, path=path, seed=seed, skip=tuple(start["skip"]))


def resumed_state(run: Run, checkpointer: Checkpointer) -> tuple[TrainState, BaseRecord | None]:
    """Restore the newest intact state of a run; return it, and its base if checkpoints do not hold every parameter."""
    trains = trained_leaves(run.step)
    state = checkpointer.restore(without_base(run.step.abstract_state, trains))
    if trains is None:
        return state, None
    base = base_of(checkpointer.metadata(int(state.step)))
    if base is None:
        return state, None
    source: Any = run.spec.params
    if source is None:
        source = published_from(run.config.model)
    params = restore_base(
        run.step.sharded_model,
        base,
        run_dir=run.spec.run_dir,
        only=lambda path: not trains(path),
        moved_to=None if source is None else os.fspath(source),
    )
    return with_base(state, params), base
