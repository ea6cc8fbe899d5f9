"""Data that a program gives: arrays, rows with an index, datasets of other libraries, or batches one after another."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxtrain.data.batches import Batch
from jaxtrain.data.sources.dataset import Data
from jaxtrain.data.stream import BatchStream, host_arrays, named_entries
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.runtime.tree import path_name

if TYPE_CHECKING:
    import grain

    from jaxtrain.data.rows import ArrayRows

_FORMS = (
    "a dict of arrays such as {'inputs': x, 'targets': y}, a pair (inputs, targets), rows with an index "
    "(jaxtrain.ArrayRows, a torch or Hugging Face dataset), a jaxtrain.Data, or an iterable of batches"
)
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
            0 and 1 (refused for a `Data` that has held-out rows); None: those of a `Data`, else none.
        seed: Decides which rows such a share holds.
        counts_tokens: Whether progress counts the tokens of `inputs` [L] instead of rows.

    Returns:
        The record. Arrays are identified by their content, other rows by their number and the content of a few of them,
        batches of an iterable by their shapes.

    Raises:
        DataError: The rows are empty, hold something other than numbers, or are batches: a `grain.MapDataset` that ends
            in `batch`, or a list that looks like one of batches.
        ConfigError: `given` or `validation` is something else.
    """
    if isinstance(given, Data):
        return given if validation is None else _with_validation(given, validation, seed=seed)
    stream = _stream(given)
    if stream is not None:
        return _with_validation(_stream_data(stream), validation, seed=seed)
    rows, identity, shown = _rows(given, "data")
    row = rows[0]
    inputs = row.get("inputs") if isinstance(row, Mapping) else None
    shape: tuple[int, ...] = np.shape(inputs) if isinstance(inputs, (np.ndarray, np.generic)) else ()
    is_tokens = counts_tokens and shape != ()
    data = Data(
        train=rows,
        validation=None,
        fingerprint=identity,
        vocab_size=None,
        num_outputs=None,
        input_shape=shape,
        unit="tokens" if is_tokens else "examples",
        units_per_row=_num_tokens(row) if is_tokens and row is not None else 1,
        tokenizer=None,
        description=(shown,),
    )
    return _with_validation(data, validation, seed=seed)


def renamed(given: Any, columns: Mapping[str, str], name: str) -> Any:
    """Returns rows in one of the forms of `data_of`, with the entries that `columns` names and no others.

    Args:
        given: Rows whose entries have other names; a share, a pair or None is returned as it is.
        columns: Our name of an entry -> what it is called there.
        name: Of the argument, in messages.

    Raises:
        DataError: A row has no such entry.
        ConfigError: It is an iterable of batches.
    """
    import grain

    from jaxtrain.data.rows import ArrayRows
    from jaxtrain.data.sources.batched import check_not_batched

    def pick(row: Any) -> dict[str, Any]:
        held = named_entries(row)
        for theirs in columns.values():
            if not isinstance(held, Mapping) or theirs not in held:
                shown = ", ".join(map(str, held)) if isinstance(held, Mapping) else _kind(held)
                raise DataError(f"columns names {theirs!r}, and {name} holds {shown}; name what it holds")
        return {ours: held[theirs] for ours, theirs in columns.items()}

    if given is None or isinstance(given, float | tuple):  # a pair says itself which is which
        return given
    if isinstance(named_entries(given), Mapping):
        return pick(given)
    if isinstance(given, ArrayRows):
        return ArrayRows(pick(given.columns))
    if isinstance(given, grain.MapDataset):
        check_not_batched(given, name)
        return given.map(pick)
    if isinstance(given, list):
        return [pick(row) for row in given]
    if isinstance(given, IndexedDataset):
        return _PickedRows(given, pick)
    raise ConfigError(f"columns are of rows with an index, and {name} is {_kind(given)}; let it give our names")


class _PickedRows:
    """Rows of a dataset, each through a function."""

    def __init__(self, dataset: IndexedDataset, pick: Callable[[Any], dict[str, Any]]):
        self._dataset = dataset
        self._pick = pick

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._pick(self._dataset[index])


def rows_of(given: Any) -> "grain.MapDataset":
    """Rows to evaluate, in the forms of `data_of` that can be read by index.

    Raises:
        DataError: The rows are empty, or hold something other than numbers.
        ConfigError: `given` is something else.
    """
    if _stream(given) is not None:
        raise ConfigError(
            f"data is {_kind(given)}, which does not say how many rows it has; give rows with an index (a dict of "
            "arrays, a dataset)"
        )
    return _rows(given, "data")[0]


def _num_tokens(row: Mapping[str, Any]) -> int:
    """The tokens of `inputs`: all ids, which pairs of answers [2, L] have of two texts, or the length [L, ...]."""
    inputs = row["inputs"]
    return inputs.size if np.issubdtype(inputs.dtype, np.integer) else next(iter(inputs.shape), 1)


def _stream(given: Any) -> BatchStream | None:
    """The batches of an iterable that has no index; None for the other forms."""
    import grain

    if isinstance(given, (Mapping, tuple, str, np.ndarray, jax.Array, grain.MapDataset, IndexedDataset)):
        return None
    return BatchStream(given) if isinstance(given, Iterable) else None


def _stream_data(stream: BatchStream) -> Data:
    if jax.process_count() > 1:
        raise ConfigError(
            "data is an iterable of batches, which one process alone can train on: several would each read other "
            "batches; give rows with an index (jaxtrain.ArrayRows, or a dataset with __len__ and __getitem__)"
        )
    spec = stream.spec()
    found = spec.get("inputs")
    again = "which is read again when it ends" if stream.restarts else "which must last for the run"
    return Data(
        train=stream,
        validation=None,
        fingerprint={"kind": "batches", "entries": _entries(spec)},
        vocab_size=None,
        num_outputs=None,
        input_shape=tuple(found.shape[1:]) if isinstance(found, jax.ShapeDtypeStruct) else (),
        unit="examples",
        units_per_row=1,
        tokenizer=None,
        description=(
            f"an iterable of batches ({_shown(spec)}), {again}",
            "no fingerprint: a run that goes on skips the batches of the steps that are done, and equals an "
            "uninterrupted one if the iterable gives the same batches again",
        ),
    )


def _rows(given: Any, name: str) -> "tuple[grain.MapDataset, dict[str, Any], str]":
    """Rows with an index, the JSON values that identify them, and a line about them.

    Args:
        given: what was passed.
        name: of the argument, in messages.
    """
    import grain

    from jaxtrain.data.rows import ArrayRows
    from jaxtrain.data.sources.batched import check_no_list_of_batches, check_not_batched, looks_like_batches

    given = named_entries(given)
    if isinstance(given, tuple) and type(given) is tuple:
        if len(given) != 2:
            raise ConfigError(f"{name} is a tuple of {len(given)}, not a pair (inputs, targets); give {_FORMS}")
        given = {"inputs": given[0], "targets": given[1]}
    if isinstance(given, Mapping):
        columns = ArrayRows(host_arrays(given, where=name))
        return _not_empty(columns, name), _array_identity(columns), _line(columns, "arrays")
    if isinstance(given, ArrayRows):
        rows = _not_empty(given, name)
        return rows, _array_identity(given), _line(rows, "arrays")
    if isinstance(given, grain.MapDataset):
        rows = _not_empty(given, name)
        check_not_batched(rows, name)
        return rows, _dataset_identity(rows), _line(rows, type(given).__name__) + looks_like_batches(rows, given)
    if hasattr(given, "iloc"):  # a table of pandas, whose [0] is a column
        raise ConfigError(
            f"{name} is {_kind(given)} of pandas, which does not say what is predicted; write "
            f"{name}=(table[['a', 'b']].to_numpy(), table['y'].to_numpy())"
        )
    if isinstance(given, IndexedDataset) and not isinstance(given, (str, bytes, np.ndarray, jax.Array)):
        rows = _not_empty(_dataset_rows(given, name), name)
        if isinstance(given, list):
            check_no_list_of_batches(rows, name, shown=_shown(rows[0]))
        identity = _dataset_identity(rows)
        drawn = (
            "" if "sha256" in identity else "; rows are drawn anew when they are read, so a resumed run reads others"
        )
        return rows, identity, _line(rows, type(given).__name__) + drawn + looks_like_batches(rows, given)
    shown = f"an array {list(given.shape)}" if isinstance(given, (np.ndarray, jax.Array)) else _kind(given)
    raise ConfigError(f"{name} is {shown}; give {_FORMS}")


def _dataset_rows(dataset: IndexedDataset, name: str) -> "grain.MapDataset":
    """The rows of a dataset of another library as a `grain.MapDataset`."""
    import grain

    return grain.MapDataset.source(_HostRows(dataset, name))


class _HostRows:
    """Rows of another library's dataset as dicts of NumPy arrays."""

    def __init__(self, dataset: IndexedDataset, name: str):
        self._dataset = dataset
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Batch:
        return host_arrays(self._dataset[int(index)], where=f"row {int(index)} of {self._name}")


def _with_validation(data: Data, validation: Any, *, seed: int) -> Data:
    """The data with rows for evaluation; the fingerprint identifies them as it does rows for training."""
    if validation is None:
        rows = None
    elif isinstance(validation, float) and not isinstance(validation, bool):
        return _with_share(data, validation, seed=seed)
    elif isinstance(validation, Data):
        raise ConfigError("validation is a jaxtrain.Data; give its rows, validation=data.validation, or a share: 0.1")
    elif _stream(validation) is not None:
        raise ConfigError(
            f"validation is {_kind(validation)}, which cannot be read again at each evaluation; give rows with an "
            "index (a dict of arrays, a dataset), or a share of the rows: validation=0.1"
        )
    else:
        rows, identity, _ = _rows(validation, "validation")
        _check_same_entries(data, rows)
        held_out = {"num_validation_rows": len(rows), "validation": identity}
        data = replace(data, validation=rows, fingerprint={**data.fingerprint, **held_out})
    return data if isinstance(data.train, BatchStream) and rows is None else _described(data)


def _with_share(data: Data, share: float, *, seed: int) -> Data:
    if not 0 < share < 1:
        raise ConfigError(f"validation={share:g}; use a share of the rows between 0 and 1, such as 0.1, or give rows")
    if data.validation is not None:
        raise ConfigError(
            f"validation={share:g} takes a share of the training rows, and the jaxtrain.Data has "
            f"{len(data.validation):,} held-out rows: leave validation out to use these, or give data as "
            "dataclasses.replace(data, validation=None)"
        )
    if isinstance(data.train, BatchStream):
        raise ConfigError(
            f"validation={share:g} takes a share of rows with an index, and data is an iterable of batches; give the "
            "rows for validation themselves: validation={'inputs': x, 'targets': y}"
        )
    from jaxtrain.data.rows import split_rows

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


def _check_same_entries(data: Data, rows: "grain.MapDataset") -> None:
    """Raises a DataError where rows for evaluation have other entries than those for training."""
    if isinstance(data.train, BatchStream):
        wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data.train.spec())
    else:
        wanted = data.train[0]
    found = rows[0]
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        raise DataError(
            f"validation holds {', '.join(_entries(found))}, but data holds {', '.join(_entries(wanted))}; give both "
            "the same entries"
        )


def _not_empty(rows: "grain.MapDataset", name: str) -> "grain.MapDataset":
    if len(rows) == 0:
        raise DataError(f"{name} has no rows; give at least one")
    if not isinstance(rows[0], Mapping):
        raise DataError(f"a row of {name} is {_kind(rows[0])}, not a dict of entries such as 'inputs' and 'targets'")
    return rows


def _line(rows: "grain.MapDataset", kind: str) -> str:
    return f"{kind}: {_shown(rows[0])}"


def _entries(tree: Any) -> dict[str, str]:
    """Entry -> its dtype and shape, as text."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}" for path, leaf in leaves}


def _shown(tree: Any) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in _entries(tree).items())


def _array_identity(rows: "ArrayRows") -> dict[str, Any]:
    """What identifies arrays: all of their numbers, or those of some rows where reading all would take long."""
    columns, num_rows = rows.columns, len(rows)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(columns))
    if num_bytes > _DIGESTED_BYTES:
        columns = rows.gather(np.linspace(0, num_rows - 1, min(num_rows, _DIGESTED_ROWS)).astype(np.int64))
    return {"kind": "arrays", "num_rows": num_rows, "sha256": _digest(columns)}


def _dataset_identity(rows: "grain.MapDataset") -> dict[str, Any]:
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
    if callable(value) and not isinstance(value, type):
        return f"a function ({getattr(value, '__name__', type(value).__name__)}); call it first"
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    return f"an instance of {type(value).__name__}"
