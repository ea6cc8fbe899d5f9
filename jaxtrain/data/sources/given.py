"""Data that a program gives: arrays, rows with an index, datasets of other libraries, or batches one after another."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import grain
import jax
import numpy as np

from jaxtrain.data.batches import Batch
from jaxtrain.data.dataset import Data
from jaxtrain.data.rows import ArrayRows, split_rows
from jaxtrain.data.stream import BatchStream, host_arrays, named_entries
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.runtime.tree import path_name

_FORMS = (
    "{'inputs': x, 'targets': y} or a pair of arrays (.to_numpy() of tables), rows with an index (jaxtrain.ArrayRows, "
    "a torch or Hugging Face dataset), a jaxtrain.Data, or an iterable of batches"
)
_NO_ROWS = (tuple, str, bytes, np.ndarray, jax.Array)
# Rows whose content goes into the fingerprint of a dataset that is too large, or too slow, to be read whole.
_PROBED_ROWS = 8
# Arrays of up to 1 GiB are digested whole, in about a second; of larger ones (on disk, perhaps) so many rows.
_DIGESTED_BYTES = 2**30
_DIGESTED_ROWS = 4096


@runtime_checkable
class IndexedDataset(Protocol):
    """What torch and Hugging Face datasets have in common; row i is a dict, or a pair (inputs, targets)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def data_of(given: Any, *, validation: Any = None, seed: int = 0, counts_tokens: bool = False) -> Data:
    """Makes a `Data` of what a program gives.

    Args:
        given: A dict of arrays [num_rows, ...] (NumPy or jax, nested dicts too) or a named tuple of them, a pair
            (inputs, targets), rows with an index (a `grain.MapDataset`, or an object with `__len__` and `__getitem__`
            whose rows are dicts or pairs), a `Data`, or an iterable of batches.
        validation: Rows for evaluation in one of these forms, or the share of the rows that are kept for it, between
            0 and 1; None: those of a `Data`, else none.
        seed: Decides which rows such a share holds.
        counts_tokens: Whether progress counts the tokens of `inputs` [L] instead of rows.

    Returns:
        The record. Arrays are identified by their content, other rows by their number and the content of a few of them,
        batches of an iterable by their shapes.

    Raises:
        DataError: The rows are empty, or hold something other than numbers.
        ConfigError: `given` or `validation` is something else.
    """
    if isinstance(given, Data):
        data = given
    elif _is_stream(given):
        data = _stream_data(BatchStream(given))
    else:
        rows, identity, shown = _rows(given, "data")
        row: Any = rows[0]
        inputs = row.get("inputs")
        shape: tuple[int, ...] = np.shape(inputs) if isinstance(inputs, (np.ndarray, np.generic)) else ()
        data = Data(rows, None, identity, input_shape=shape, description=(shown,))
        if counts_tokens and shape:
            # All ids, which pairs of answers [2, L] have of two texts, or the length [L, ...].
            size = inputs.size if np.issubdtype(inputs.dtype, np.integer) else shape[0]
            data = replace(data, unit="tokens", units_per_row=size)
    if validation is None:
        return data if isinstance(given, Data) or isinstance(data.train, BatchStream) else _described(data)
    if isinstance(validation, float):
        return _with_share(data, validation, seed=seed)
    rows, identity, _ = _rows(validation, "validation")
    wanted = data.train.spec() if isinstance(data.train, BatchStream) else data.train[0]
    if jax.tree.structure(rows[0]) != jax.tree.structure(wanted):
        raise DataError(
            f"validation holds {', '.join(_entries(rows[0]))}, but data holds {', '.join(_entries(wanted))}; give both "
            "the same entries"
        )
    held_out = {"num_validation_rows": len(rows), "validation": identity}
    return _described(replace(data, validation=rows, fingerprint={**data.fingerprint, **held_out}))


def rows_of(given: Any) -> grain.MapDataset:
    """Rows to evaluate, in the forms of `data_of` that can be read by index."""
    return _rows(given, "data")[0]


def called_data(made: Any, *, label: str) -> Data:
    """Makes a `Data` of what the function `label` returned.

    It may be a `Data`, a dict of arrays with the entry `inputs`, rows first, or a dict of two such dicts, `train` and
    `validation`; a DataError where it is something else.
    """
    if isinstance(made, Data):
        return made
    parts = made if isinstance(made, Mapping) and "train" in made else {"train": made}
    if not all(isinstance(part, Mapping) and "inputs" in part for part in parts.values() if part is not None):
        raise DataError(
            f"data.call={label} returned {_kind(made)}; return a jaxtrain.Data, {{'inputs': x, 'targets': y}}, "
            "rows first, or {'train': {...}, 'validation': {...}} of such dicts"
        )
    train = host_arrays(parts["train"], where=f"data.call={label}: train")
    data = data_of(train, validation=parts.get("validation"))
    sides: list[Any] = [rows.columns for rows in (data.train, data.validation) if isinstance(rows, ArrayRows)]
    inputs, targets = sides[0]["inputs"], sides[0].get("targets")
    classes = [side["targets"] for side in sides if _are_whole(side.get("targets"), ndim=1)]
    if _are_whole(inputs, ndim=2) and _are_whole(targets, ndim=2) and inputs.shape == targets.shape:
        data = replace(data, unit="tokens", units_per_row=inputs.shape[1])
    elif classes and classes[0] is targets:
        data = replace(data, num_outputs=int(max(side.max() for side in classes)) + 1)
    shape = jax.tree.leaves(inputs)[0].shape[1:]
    return replace(data, input_shape=shape, description=(f"{label}: {data.description[0]}", *data.description[1:]))


def _are_whole(values: Any, *, ndim: int) -> bool:
    return isinstance(values, np.ndarray) and values.ndim == ndim and np.issubdtype(values.dtype, np.integer)


def renamed(given: Any, columns: Mapping[str, str], name: str) -> Any:
    """Returns rows in one of the forms of `data_of` (`name` in messages) with the entries that `columns` names alone.

    `columns` are our name of an entry -> what it is called there; a share, a pair or None is returned as it is.
    """

    def pick(row: Any) -> dict[str, Any]:
        held = named_entries(row)
        there = list(map(str, held)) if isinstance(held, Mapping) else []
        missing = next((theirs for theirs in columns.values() if theirs not in there), None)
        if missing is not None:
            raise DataError(f"columns names {missing!r}, but {name} holds {', '.join(there) or _kind(held)}")
        return {ours: held[theirs] for ours, theirs in columns.items()}

    if given is None or isinstance(given, float | tuple):  # a pair says itself which is which
        return given
    if hasattr(given, "iloc"):  # a table of pandas, whose [0] is a column
        given = {column: given[column].to_numpy() for column in given.columns}
    if isinstance(named_entries(given), Mapping):
        return pick(given)
    if isinstance(given, ArrayRows):
        return ArrayRows(pick(given.columns))
    if isinstance(given, grain.MapDataset):
        return given.map(pick)
    if isinstance(given, IndexedDataset):
        return _Mapped(given, lambda row, _: pick(row))
    raise ConfigError(f"columns need rows with an index, but {name} is {_kind(given)}; rename its entries")


class _Mapped:
    """Rows of a dataset, each through a function of (row, its number)."""

    def __init__(self, dataset: IndexedDataset, change: Callable[[Any, int], Batch]):
        self._dataset, self._change = dataset, change

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Batch:
        return self._change(self._dataset[int(index)], int(index))


def _is_stream(given: Any) -> bool:
    """Returns whether something is an iterable of batches that has no index."""
    if isinstance(given, (Mapping, tuple, str, np.ndarray, jax.Array, grain.MapDataset, IndexedDataset)):
        return False
    return isinstance(given, Iterable)


def _stream_data(stream: BatchStream) -> Data:
    if jax.process_count() > 1:
        raise ConfigError(
            "data is an iterable of batches, which each process would read differently; give rows with an index "
            "(jaxtrain.ArrayRows, or a dataset with __len__ and __getitem__)"
        )
    spec = stream.spec()
    found = spec.get("inputs")
    again = "which is read again when it ends" if stream.restarts else "which must last for the run"
    return Data(
        train=stream,
        validation=None,
        fingerprint={"kind": "batches", "entries": _entries(spec)},
        input_shape=tuple(found.shape[1:]) if isinstance(found, jax.ShapeDtypeStruct) else (),
        description=(f"an iterable of batches ({_shown(spec)}), {again}",),
    )


def _rows(given: Any, name: str) -> tuple[grain.MapDataset, dict[str, Any], str]:
    """Rows with an index, the JSON values that identify them, and a line about them."""
    kind = type(given).__name__
    given = named_entries(given)
    if type(given) is tuple and len(given) == 2:
        given = {"inputs": given[0], "targets": given[1]}
    if isinstance(given, Mapping):
        given = ArrayRows(host_arrays(given, where=name))
    if isinstance(given, grain.MapDataset):
        rows = given
    # [0] of a table of pandas, which has `iloc`, is a column.
    elif isinstance(given, IndexedDataset) and not (isinstance(given, _NO_ROWS) or hasattr(given, "iloc")):
        rows = grain.MapDataset.source(_Mapped(given, lambda row, i: host_arrays(row, where=f"row {i} of {name}")))
    else:
        shown = f"an array {list(given.shape)}" if isinstance(given, (np.ndarray, jax.Array)) else _kind(given)
        raise ConfigError(f"{name} is {shown}; give {_FORMS}")
    first: Any = rows[0] if len(rows) else None
    if not isinstance(first, Mapping):
        raise DataError(f"{name} has no rows, or no dicts of entries such as 'inputs' and 'targets': {_kind(first)}")
    if isinstance(rows, ArrayRows):
        return rows, _array_identity(rows), f"arrays: {_shown(first)}"
    identity = _dataset_identity(rows)
    drawn = "" if "sha256" in identity else "; random rows are drawn when read, so a resumed run reads different ones"
    return rows, identity, f"{kind}: {_shown(first)}{drawn}"


def _with_share(data: Data, share: float, *, seed: int) -> Data:
    if not 0 < share < 1 or data.validation is not None or isinstance(data.train, BatchStream):
        raise ConfigError(
            f"validation={share:g} needs a share between 0 and 1, rows with an index and no held-out rows; else give "
            "rows: validation={'inputs': x, 'targets': y}"
        )
    train, validation = split_rows(data.train, share=share, seed=seed)
    split = {"share": share, "seed": seed, "num_rows": len(train), "num_validation_rows": len(validation)}
    return _described(replace(data, train=train, validation=validation, fingerprint={**data.fingerprint, **split}))


def _described(data: Data) -> Data:
    """The data with the numbers of its rows as the last line of its description."""
    held_out = 0 if data.validation is None else len(data.validation)
    counts = f"{held_out:,} validation rows"
    if not isinstance(data.train, BatchStream):
        counts = f"{len(data.train):,} training rows and {counts}"
    return replace(data, description=(*data.description, counts))


def _entries(tree: Any) -> dict[str, str]:
    """Entry -> its dtype and shape, as text."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}" for path, leaf in leaves}


def _shown(tree: Any) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in _entries(tree).items())


def _array_identity(rows: ArrayRows) -> dict[str, Any]:
    """What identifies arrays: all of their numbers, or those of some rows where reading all would take long."""
    columns, num_rows = rows.columns, len(rows)
    if sum(leaf.nbytes for leaf in jax.tree.leaves(columns)) > _DIGESTED_BYTES:
        columns = rows.gather(np.linspace(0, num_rows - 1, min(num_rows, _DIGESTED_ROWS)).astype(np.int64))
    return {"kind": "arrays", "num_rows": num_rows, "sha256": _digest(columns)}


def _dataset_identity(rows: grain.MapDataset) -> dict[str, Any]:
    """What identifies rows that are read one by one: their number, and a few of them where they are always the same."""
    probed = np.unique(np.linspace(0, len(rows) - 1, _PROBED_ROWS).astype(int)).tolist()
    first, second = ([_digest(rows[index]) for index in probed] for _ in range(2))
    identity = {"kind": "dataset", "num_rows": len(rows), "entries": _entries(rows[0])}
    if first != second:  # augmented at random: its rows identify nothing
        return identity
    return {**identity, "sha256": hashlib.sha256(json.dumps(first).encode()).hexdigest()}


def _digest(tree: Any) -> str:
    """The digest of every name, dtype, shape and number of a tree of arrays."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        digest.update(f"{path_name(path)} {array.dtype.name} {list(array.shape)};".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data if array.size else b"")
    return digest.hexdigest()


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value):
        return f"a function ({getattr(value, '__name__', type(value).__name__)}); call it first"
    return repr(value) if value is None or isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
