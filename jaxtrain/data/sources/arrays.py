"""Rows of arrays that a function of the user's returned, with their fingerprint."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.data.rows import ArrayRows
from jaxtrain.errors import DataError
from jaxtrain.runtime.call import described
from jaxtrain.runtime.tree import path_name

_WRITE = "{'inputs': x, 'targets': y}, rows first, or {'train': {...}, 'validation': {...}} of such dicts"


@dataclass(frozen=True)
class Arrays:
    """Rows of arrays in memory.

    Attributes:
        train: The training rows.
        validation: The rows kept for evaluation; None: there are none.
        num_outputs: Number of classes, where the targets are one integer per row; else None.
        input_shape: Shape of one row's "inputs"; of the first array where they are several.
        are_tokens: Whether inputs and targets are integers of one shape, [rows, L].
        identity: The fingerprint: SHA-256 of names, dtypes, shapes and content.
        description: Lines that describe the rows to the user.
    """

    train: ArrayRows
    validation: ArrayRows | None
    num_outputs: int | None
    input_shape: tuple[int, ...]
    are_tokens: bool
    identity: dict[str, Any]
    description: tuple[str, ...]


def open_arrays(made: Any, *, label: str) -> Arrays:
    """Takes the arrays that a function returned.

    Args:
        made: A dict of arrays with the entry `inputs`, rows first; or a dict of two such dicts, `train` and
            `validation`.
        label: The function, for messages.

    Raises:
        DataError: It is something else, or the arrays differ in their number of rows.
    """
    if not isinstance(made, Mapping):
        raise DataError(f"data.call={label} returned {described(made)}, not a jaxtrain.Data or arrays; return {_WRITE}")
    parts = dict(made) if "train" in made else {"train": made}
    unknown = [str(name) for name in parts if name not in ("train", "validation")]
    if unknown:
        raise DataError(f"data.call={label} returned {unknown[0]!r} beside 'train'; return {_WRITE}")
    columns = {name: _columns(part, name, label) for name, part in parts.items() if part is not None}
    if "train" not in columns:
        raise DataError(f"data.call={label} returned no training rows; return {_WRITE}")
    rows = {name: ArrayRows(part) for name, part in columns.items()}
    digest = hashlib.sha256()
    for name, part in columns.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            array = np.ascontiguousarray(leaf)
            digest.update(f"{name}/{path_name(path)} {array.dtype.str} {array.shape};".encode())
            digest.update(array.tobytes() if array.dtype.hasobject else array.view(np.uint8).data)
    inputs = np.asarray(jax.tree.leaves(columns["train"]["inputs"])[0])
    targets = columns["train"].get("targets")
    held_out = len(rows["validation"]) if "validation" in rows else 0
    return Arrays(
        train=rows["train"],
        validation=rows.get("validation"),
        num_outputs=_classes(targets, columns.get("validation", {}).get("targets")),
        input_shape=inputs.shape[1:],
        are_tokens=_are_tokens(columns["train"]["inputs"], targets),
        identity={"kind": "arrays", "sha256": digest.hexdigest(), "num_rows": len(rows["train"])},
        description=(f"{label}: {len(rows['train']):,} training rows and {held_out:,} validation rows",),
    )


def _columns(part: Any, name: str, label: str) -> dict[str, Any]:
    if not isinstance(part, Mapping) or "inputs" not in part:
        given = (
            f"a dict with {', '.join(map(str, part)) or 'nothing'}" if isinstance(part, Mapping) else described(part)
        )
        raise DataError(f"data.call={label} returned {given} as {name} rows, without 'inputs'; return {_WRITE}")
    arrays = jax.tree.map(np.asarray, dict(part), is_leaf=lambda value: isinstance(value, list | tuple))
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        if leaf.dtype.kind not in "biuf":
            raise DataError(
                f"data.call={label} returned {path_name(path)} of {leaf.dtype}, which is no number; return numbers"
            )
        if leaf.ndim == 0 or not len(leaf):
            raise DataError(f"data.call={label} returned {path_name(path)} without rows; return {_WRITE}")
    return arrays


def _classes(targets: Any, held_out: Any) -> int | None:
    """Returns the number of classes, those of held-out rows among them; None: targets are no classes."""
    if not _are_classes(targets):
        return None
    return int(max(targets.max(), held_out.max() if _are_classes(held_out) else 0)) + 1


def _are_classes(targets: Any) -> bool:
    return isinstance(targets, np.ndarray) and targets.ndim == 1 and np.issubdtype(targets.dtype, np.integer)


def _are_tokens(inputs: Any, targets: Any) -> bool:
    both = [one for one in (inputs, targets) if isinstance(one, np.ndarray) and np.issubdtype(one.dtype, np.integer)]
    return len(both) == 2 and both[0].ndim == 2 and both[0].shape == both[1].shape
