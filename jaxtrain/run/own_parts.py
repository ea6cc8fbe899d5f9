"""Parts of a run that came from Python: recorded by name, and not replaced by the config's when the run goes on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.config.files import recorded_parts
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.progress import Progress
from jaxtrain.run.callbacks import Callback, EarlyStopping

if TYPE_CHECKING:
    from jaxtrain.data import Data
    from jaxtrain.models.model import Model
    from jaxtrain.models.task import Task
    from jaxtrain.train.own_step import OwnStep

OwnParts = dict[str, str | None]
# What a run asks to be given again; other data is noticed by its content.
_GIVEN_AGAIN = ("model", "task", "optimizer")


@dataclass(frozen=True)
class Given:
    """What `fit` and `run_config` were given beside the config; see there."""

    own_step: "OwnStep"
    resume: str | None = None
    model: "Model | None" = None
    task: "Task | None" = None
    data: "Data | None" = None
    callbacks: Sequence[Callback | EarlyStopping] = ()
    progress: Progress | None = None


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


def check_evaluable(record: Mapping[str, Any], run_dir: Path, *, needed: tuple[str, ...]) -> None:
    """Raise where a command would take a part from the config that came from Python in the run."""
    parts = recorded_parts(record)
    own = [part for part in needed if parts[part] is not None]
    if own:
        shown = " and ".join(f"{part} ({parts[part]})" for part in own)
        given = "".join(f", {part}=..." for part in own if part != "data")
        how = f"jt.open_run({str(run_dir)!r}{given})" + (".evaluate(data)" if "data" in own else "")
        other = ", or give other data with data.kind=... data.path=..." if "data" in own else ""
        raise ConfigError(
            f"{run_dir} was trained with {shown} from Python, which its config does not describe: write {how} in "
            f"Python{other}"
        )


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
