"""Checks of what a caller gives to a Checkpointer, made before it waits for or writes anything."""

import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.checkpoint import tree
from jaxtrain.checkpoint.directory import CheckpointInfo
from jaxtrain.checkpoint.places import Place, place_at
from jaxtrain.checkpoint.remote import RemotePath
from jaxtrain.config.arguments import refusal, shown
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.runtime.tree import first_deleted


def checked_step(step: Any) -> int:
    """Return a step number, which may be an integer of Python, NumPy or jax, as an int.

    Raises:
        CheckpointError: the step is negative or not an integer.
    """
    found = _whole(step)
    if found is None or found < 0:
        raise CheckpointError(f"cannot save step {shown(step)}: use an integer of 0 or more, such as int(state.step)")
    return found


def check_not_empty(state: Any, leaves: Mapping[str, Any]) -> None:
    """Raise where a state holds no array.

    Args:
        state: what was given.
        leaves: its arrays by name.

    Raises:
        CheckpointError: there are none.
    """
    if not leaves:
        raise CheckpointError(
            refusal("save", "a state with arrays", state, "checkpointer.save(int(state.step), state, metadata={})")
        )


def check_target(target: Any) -> None:
    """Raise where what a checkpoint is to be restored into is no tree of arrays.

    Args:
        target: what was given.

    Raises:
        CheckpointError: it is a number or None; a dict may be empty, as the model_state of most models is.
    """
    if target is None or isinstance(target, int | float):
        write = "checkpointer.restore(step.abstract_state, step=10)"
        raise CheckpointError(refusal("restore", "a tree of arrays or of their shapes as target", target, write))


def checked_metadata(metadata: Any) -> dict[str, Any]:
    """Return the metadata of a step as a dict.

    Raises:
        CheckpointError: the metadata is not a mapping.
    """
    if not isinstance(metadata, Mapping):
        raise CheckpointError(f"metadata of a checkpoint is a {type(metadata).__name__}: use a dict, {{}} for nothing")
    return dict(metadata)


def checked_loss(eval_loss: Any, *, name: str = "eval_loss") -> float | None:
    """Return an evaluation loss as a float, or None where there is none.

    Args:
        eval_loss: what was given.
        name: of it, in the message.

    Raises:
        CheckpointError: the loss is not a number.
    """
    if eval_loss is None:
        return None
    try:
        if isinstance(eval_loss, str | bytes):
            raise TypeError
        return float(eval_loss)
    except (TypeError, ValueError):
        raise CheckpointError(
            f"{name} of a checkpoint is a {type(eval_loss).__name__}: use a number, or None where there is none"
        ) from None


def checked_scores(scores: Any) -> dict[int, float | None]:
    """Return the scores of steps by the number of the step.

    Raises:
        CheckpointError: no dict, or a step or a score is no number.
    """
    return {checked_step(step): checked_loss(score, name="score") for step, score in scores.items()}


def checked_counts(*, keep_last: Any, keep_every: Any) -> tuple[int, int | None]:
    """Return how many of the newest steps stay, and the number whose multiples stay (None for no such rule).

    Raises:
        ConfigError: one of them is not an integer of at least 1.
    """
    last, every = _whole(keep_last), None if keep_every is None else _whole(keep_every)
    if last is None or last < 1:
        raise ConfigError(
            f"keep_last is {keep_last!r}: use an integer of 1 or more, because the newest checkpoint is always kept"
        )
    if keep_every is not None and (every is None or every < 1):
        raise ConfigError(f"keep_every is {keep_every!r}: use an integer of 1 or more, or None for no such rule")
    return last, every


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_like(info: CheckpointInfo, wanted: Mapping[str, Any], prefix: str | None) -> None:
    """Raise where the record of a step has other leaves than are wanted; the message says what differs.

    Args:
        info: record of the step.
        wanted: path -> leaf of the target.
        prefix: path of the target inside the saved tree; None: it is all of it.

    Raises:
        CheckpointError: a name, a shape or a dtype differs.
    """
    found = tree.difference(
        {name: leaf for name, leaf in info.leaves.items() if tree.is_inside(name, prefix)},
        {name: tree.describe(leaf, name) for name, leaf in wanted.items()},
    )
    if found is not None:
        parts = {tree.part_of(name) for name in found.names}
        what = "model" if parts & {"params", "model_state"} else "optimizer" if "optimizer_state" in parts else "kind"
        if parts <= {"ema", "ema_model_state"}:
            what = "moving average"
        raise CheckpointError(f"checkpoint {info.path} is of another {what}: {found.phrase}")


def check_deleted(path: Place, leaves: Mapping[str, Any]) -> None:
    """Raise where a step has taken over a state that is to be saved.

    Args:
        path: of the checkpoint, for the message.
        leaves: path -> leaf of the state.

    Raises:
        CheckpointError: an array is deleted.
    """
    gone = first_deleted(leaves)
    if gone is not None:
        raise CheckpointError(
            f"cannot save checkpoint {path}: {tree.shown_name(gone)} is deleted, since a step took this state "
            "over; save the state that the step returned: state, metrics = step(state, batch)"
        )


def check_leaves(info: CheckpointInfo, wanted: Mapping[str, Any]) -> None:
    """Raise where single leaves are not as the record of a step has them.

    Args:
        info: record of the step.
        wanted: stored name -> shape that is to be read.

    Raises:
        CheckpointError: one is not there, or has another shape or dtype.
    """
    found = {name: tree.describe(leaf, name) for name, leaf in wanted.items()}
    differs = tree.difference({name: leaf for name, leaf in info.leaves.items() if name in wanted}, found)
    if differs is not None:
        raise CheckpointError(f"checkpoint {info.path}: {differs.phrase}")


def check_writable(directory: Place, *, read_only: bool, is_closed: bool) -> None:
    """Raise where a Checkpointer was opened for reading only, or nobody would wait for what it saves.

    Raises:
        CheckpointError: it was.
    """
    if read_only:
        raise CheckpointError(f"checkpoints in {directory} were opened for reading only")
    if is_closed:
        raise CheckpointError(
            f"the Checkpointer of {directory} is closed: nothing would wait for what it saves; save inside its `with` "
            "block, or before close()"
        )


def checked_directory(directory: str | os.PathLike[str] | RemotePath) -> Place:
    """Return the absolute path of a checkpoint directory, or its address in an object store.

    Raises:
        ConfigError: it is a file.
    """
    place = place_at(directory, what="checkpoint directory")
    if isinstance(place, RemotePath):
        return place
    path = place.absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"checkpoint directory {path} is a file: choose another directory")
    return path


def none_left(directory: Place, damaged: Sequence[tuple[int, str]]) -> CheckpointError:
    """Return the error of a directory whose steps are all damaged.

    Args:
        directory: of the steps.
        damaged: steps with what is wrong, the newest first.
    """
    return CheckpointError(
        f"no intact checkpoint is left in {directory} ({len(damaged)} damaged): {damaged[0][1]}; "
        "restore the files from a copy, or start again in another run directory"
    )
