"""The content of a checkpoint directory, handled without jax or Orbax: steps, their records, what is kept or renamed.

A step is a directory (not a link) whose name is its number and which holds our item `jaxtrain`; everything else is
ignored. Orbax writes into a directory with another name and renames it at the end, so a directory with the name of a
step is complete. In an object store it writes a marker at the end; `places` has what differs there.
"""

import errno
import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.checkpoint import places
from jaxtrain.checkpoint.places import Place
from jaxtrain.errors import CheckpointError

FORMAT_VERSION = 1
RECORD_ITEM = "jaxtrain"
ARRAYS_ITEM = "state"
_TEMPORARY = ".orbax-checkpoint-tmp"
_TRASH = ".pruned"
COPYING = ".copying"
# Errors of opening a file which say that it is not there, or not a file.
_IS_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


class DamagedError(CheckpointError):
    """A step cannot be read, or does not hold what was saved; an older step may be used instead."""


@dataclass(frozen=True)
class CheckpointInfo:
    """The record of a saved step, read without its arrays.

    Attributes:
        step: number of the step.
        path: its directory.
        metadata: the JSON values that were given to `save`.
        leaves: path -> shape and dtype of each leaf.
        digests: path -> digest of each stored array.
        key_implementations: path -> generator of each random key.
        eval_loss: evaluation loss of the step; None: not evaluated.
        score: what `keep_best` compares in place of it, lower being better; None: the loss.
        versions: package -> version that saved the step.
        saved_at: time of the save, ISO 8601.
    """

    step: int
    path: Place
    metadata: dict[str, Any]
    leaves: dict[str, tuple[tuple[int, ...], str]] = field(repr=False)
    digests: dict[str, tuple[int, int]] = field(repr=False)
    key_implementations: dict[str, str] = field(repr=False)
    eval_loss: float | None
    versions: dict[str, str]
    saved_at: str
    score: float | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays in memory, before compression."""
        return sum(self.bytes_of(name) for name in self.leaves)

    def bytes_of(self, name: str) -> int:
        """The bytes of one array in memory."""
        shape, dtype = self.leaves[name]
        return math.prod(shape) * _itemsize(dtype)


def _itemsize(dtype: str) -> int:
    if dtype.startswith("key<"):
        return 8  # threefry; keys of other generators differ by a few bytes
    bits = re.search(r"\d+", dtype)
    # Numbers narrower than a byte take one byte each outside an accelerator.
    return max(1, int(bits.group()) // 8) if bits else 1


def step_path(directory: Place, step: int) -> Place:
    """Return the directory of a step, which need not exist."""
    return directory / str(step)


def list_steps(directory: Place) -> list[int]:
    """Return the numbers of the saved steps in ascending order; a directory that does not exist has none.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    try:
        names = [name for name in places.names(directory) if name.isdecimal()]
        steps = sorted(int(name) for name in names if name == str(int(name)))
        return [step for step in steps if places.is_complete(step_path(directory, step), item=RECORD_ITEM)]
    except OSError as error:
        raise CheckpointError(f"cannot read {directory}: {error.strerror}") from error


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record as it is stored: JSON values with a checksum.

    Raises:
        CheckpointError: the metadata cannot be written as JSON.
    """
    try:
        plain = json.loads(json.dumps(content))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"metadata of a checkpoint must be JSON: {error}") from error
    return {"sha256": _checksum(plain), "content": plain}


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_info(directory: Place, step: int) -> CheckpointInfo:
    """Read the record of a step.

    Raises:
        DamagedError: the record is missing, unreadable or altered.
        CheckpointError: a newer jaxtrain wrote it, or this user may not read it.
    """
    path = step_path(directory, step)
    try:
        sealed = json.loads(places.read_bytes(path / RECORD_ITEM / "metadata"))
        content = sealed["content"]
        intact = sealed["sha256"] == _checksum(content)
    except OSError as error:
        # What could not be opened for another reason (no permission, a stale handle, too many open files) may be whole.
        if error.errno not in _IS_DAMAGE:
            raise CheckpointError(f"cannot read checkpoint {path}: {error.strerror or error}") from error
        raise DamagedError(f"checkpoint {path} is damaged: its record cannot be read") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"checkpoint {path} is damaged: its record cannot be read") from error
    if not intact:
        raise DamagedError(f"checkpoint {path} is damaged: its record was altered")
    if content["format_version"] > FORMAT_VERSION:
        writer = content["versions"].get("jaxtrain", "?")
        raise CheckpointError(
            f"checkpoint {path} has format {content['format_version']}, written by jaxtrain {writer}; this one reads "
            f"up to {FORMAT_VERSION}: install that version or a later one"
        )
    return CheckpointInfo(
        step=step,
        path=path,
        metadata=content["metadata"],
        leaves={name: (tuple(shape), dtype) for name, (shape, dtype) in content["leaves"].items()},
        digests={name: (first, second) for name, (first, second) in content["digests"].items()},
        key_implementations=content["key_implementations"],
        eval_loss=content["eval_loss"],
        versions=content["versions"],
        saved_at=content["saved_at"],
        score=content.get("score"),
    )


def write_eval_loss(directory: Place, step: int, eval_loss: float, score: float | None) -> None:
    """Write the eval_loss and the score of a saved step into its record, which is replaced atomically.

    Raises:
        CheckpointError: the record is damaged or cannot be written.
    """
    path = read_info(directory, step).path / RECORD_ITEM / "metadata"
    try:
        content = json.loads(places.read_bytes(path))["content"]
        places.write_bytes(path, json.dumps(seal({**content, "eval_loss": eval_loss, "score": score})).encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def steps_to_keep(
    losses: Mapping[int, float | None], *, keep_last: int, keep_every: int | None, keep_best: bool
) -> set[int]:
    """Return the steps that are kept.

    Args:
        losses: step -> eval_loss (or score) of every saved step; None where it was not evaluated.
        keep_last: number of the newest steps that are kept.
        keep_every: steps at multiples of this are kept; None: no such rule.
        keep_best: whether the step with the lowest finite loss is kept (of equal losses the earliest).
    """
    kept = set(sorted(losses)[-keep_last:])
    if keep_every is not None:
        kept |= {step for step in losses if step % keep_every == 0}
    scored = [(loss, step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    if keep_best and scored:
        kept.add(min(scored)[1])
    return kept


def remove(directory: Place, steps: Iterable[int]) -> None:
    """Delete steps, so that a kill leaves no incomplete directory under the name of a step."""
    for step in steps:
        places.remove_step(step_path(directory, step), trash=f"{step}{_TRASH}")


def clear_leftovers(directory: Place) -> None:
    """Delete what an interrupted save or removal left behind, and finish what is half moved."""
    places.finish_moves(directory)
    for name in places.names(directory):
        number, dot, suffix = name.partition(".")
        if not number.isdecimal():
            continue
        is_temporary = f"{dot}{suffix}".startswith((_TEMPORARY, _TRASH, COPYING))
        entry = directory / name
        if places.is_leftover(entry, is_temporary=is_temporary, items=(RECORD_ITEM, ARRAYS_ITEM)):
            places.remove_tree(entry)


def set_aside(directory: Place, step: int, *, reason: str) -> Place:
    """Rename whatever is at a step's path to `<step>.<reason>-<time>` and return its path after that.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    source = step_path(directory, step)
    target = directory / f"{step}.{reason}-{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**6:06d}"
    try:
        places.move(source, target)
    except OSError as error:
        raise CheckpointError(f"cannot rename {source} to {target.name}: {error.strerror}") from error
    return target
