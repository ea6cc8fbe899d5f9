"""The content of a checkpoint directory, handled without jax or Orbax: steps, their records, and their removal.

A step is a directory (not a link) whose name is its number and which holds our item `jaxtrain`; everything else is
ignored. Orbax writes into a directory with another name and renames it at the end, so a directory with the name of a
step is complete. In an object store it writes a marker at the end instead; see `places`.
"""

import contextlib
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jaxtrain.checkpoint import places
from jaxtrain.checkpoint.places import RECORD_ITEM, TRASH, Place
from jaxtrain.errors import CheckpointError

FORMAT_VERSION = 1
_TEMPORARY = ".orbax-checkpoint-tmp"
# What reading a damaged record raises: the file is missing, is not a file, or does not hold a record.
_DAMAGE = (
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    ValueError,
    KeyError,
    TypeError,
    RecursionError,
)


class DamagedError(CheckpointError):
    """A step cannot be read, or does not hold what was saved; an older step may be used instead."""


class SaveError(CheckpointError):
    """A step could not be saved, because of the disk or of what is at its path; the steps before it are kept."""


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
        score: what `keep_best` compares instead of the loss, lower being better; None: the loss.
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
        size = 1  # of bool, and of numbers narrower than a byte, which take one each outside an accelerator
        if dtype.startswith("key<"):
            size = 8  # of a key of threefry
        elif bits := re.search(r"\d+", dtype):
            size = max(1, int(bits.group()) // 8)
        return math.prod(shape) * size


def list_steps(directory: Place) -> list[int]:
    """Return the numbers of the saved steps in ascending order; a directory that does not exist has none."""
    with failing(f"cannot read {directory}"):
        names = places.names(directory)
        steps = sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))
        return [step for step in steps if places.is_complete(directory / str(step))]


@contextlib.contextmanager
def failing(what: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror or error}") from error


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record as it is stored: JSON values with a checksum."""
    plain = json.loads(json.dumps(content))
    return {"sha256": _checksum(plain), "content": plain}


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_info(directory: Place, step: int) -> CheckpointInfo:
    """Read the record of a step.

    Raises:
        DamagedError: it is missing, or is not what was saved.
        CheckpointError: it cannot be opened (no permission, a stale handle, too many open files), but may be intact.
    """
    path = directory / str(step)
    damaged = DamagedError(f"checkpoint {path} is damaged: its record cannot be read")
    with failing(f"cannot read checkpoint {path}"):
        try:
            sealed = json.loads((path / RECORD_ITEM / "metadata").read_bytes())
            content = sealed["content"]
            if sealed["sha256"] != _checksum(content):
                raise damaged
        except _DAMAGE:
            raise damaged from None
    record = {item.name: content[item.name] for item in fields(CheckpointInfo) if item.name not in ("step", "path")}
    record["leaves"] = {name: (tuple(shape), dtype) for name, (shape, dtype) in content["leaves"].items()}
    record["digests"] = {name: tuple(digest) for name, digest in content["digests"].items()}
    return CheckpointInfo(step=step, path=path, **record)


def write_eval_loss(directory: Place, step: int, eval_loss: float, score: float | None) -> None:
    """Write the eval_loss and the score of a saved step into its record, which is replaced atomically."""
    path = read_info(directory, step).path / RECORD_ITEM / "metadata"
    with failing(f"cannot write {path}"):
        content = {**json.loads(path.read_bytes())["content"], "eval_loss": eval_loss, "score": score}
        places.write_bytes(path, json.dumps(seal(content)).encode())


def clear_leftovers(directory: Place) -> None:
    """Delete what an interrupted save or removal left behind, and finish interrupted moves."""
    places.finish_moves(directory)
    for name in places.names(directory):
        number, dot, suffix = name.partition(".")
        is_temporary = f"{dot}{suffix}".startswith((_TEMPORARY, TRASH))
        if number.isdecimal() and (is_temporary or places.is_incomplete(directory / name)):
            places.remove_tree(directory / name)


def set_aside(directory: Place, step: int, *, reason: str) -> Place:
    """Rename whatever is at a step's path to `<step>.<reason>-<time>` and return its path after that."""
    source = directory / str(step)
    target = directory / f"{step}.{reason}-{moment()}"
    with failing(f"cannot rename {source} to {target.name}"):
        places.move(source, target)
    return target


def moment() -> str:
    """Return this moment as a part of a name that no other one has; the names sort by time."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"{time.strftime('%Y%m%dT%H%M%S', time.localtime(seconds))}-{nanoseconds:09d}"
