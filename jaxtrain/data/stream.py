"""Batches from an iterator, which has no index: read in order, and skipped up to the step that a run goes on from."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.data.batches import Batch, in_dtypes
from jaxtrain.errors import DataError
from jaxtrain.runtime.tree import path_name

# id -> iterator that batches were read from, as long as it lives. Those of zip, map and lists take no weak reference.
_READ_FROM: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class BatchStream:
    """Batches of an iterable, in its own order; it takes the place of rows with an index in `Data.train`.

    An iterable that can be read again (a DataLoader) is, when it ends; an iterator must last for the run.

    Args:
        batches: Each a dict of arrays, of nested dicts of arrays, or a pair (inputs, targets); all of one shape.

    Raises:
        DataError: There is no batch, the first one is no dict of arrays, or another stream has read from the iterator.
    """

    def __init__(self, batches: Iterable[Any]):
        self._source = batches
        self._iterator = iter(batches)
        # Iterators return themselves; what does not can be read once more.
        self._restarts = self._iterator is not batches
        if not self._restarts:
            _check_unread(batches)
        self._position = 0
        self._first: Batch | None = self._read()
        self._spec = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)), self._first
        )
        self._size = _num_rows(self._spec)

    @property
    def batch_size(self) -> int:
        """Number of rows per batch."""
        return self._size

    @property
    def restarts(self) -> bool:
        """Whether the iterable is read again when it ends."""
        return self._restarts

    @property
    def first(self) -> Batch | None:
        """Batch 0 as NumPy arrays; None once it was loaded."""
        return self._first

    def spec(self) -> dict[str, Any]:
        """Returns the shape and dtype of each entry of a batch."""
        return dict(self._spec)

    def load(self, k: int, shardings: Mapping[str, Any], *, check: Callable[[Batch], None] | None = None) -> Batch:
        """Reads batch k, and what lies before it and was not read yet.

        Args:
            k: Number of the batch, from 0; not below that of the last call.
            shardings: The sharding of each entry of `spec()`.
            check: Called with the batch as NumPy arrays before it is moved to devices.

        Returns:
            Arrays in these shardings.

        Raises:
            DataError: The iterator ended, or a batch has another shape than the first.
        """
        assert k >= self._position, (k, self._position)
        batch = self._next()
        while self._position <= k:
            batch = self._next()
        self._check_shapes(batch, k)
        if check is not None:
            check(batch)
        batch = in_dtypes(batch, self._spec, where=f"batch {k} holds", first="batch 0")
        return jax.device_put(batch, {name: shardings[name] for name in batch})

    def _next(self) -> Batch:
        batch, self._first = self._first, None
        if batch is None:
            batch = self._read()
        self._position += 1
        return batch

    def _read(self) -> Batch:
        """Returns the next batch as a dict of NumPy arrays."""
        missing = object()
        found = next(self._iterator, missing)
        if found is missing and self._restarts:
            self._iterator = iter(self._source)
            found = next(self._iterator, missing)
        if found is missing:
            if self._position == 0:
                raise DataError("the iterable of batches is empty; give at least one batch")
            raise DataError(
                f"the iterator ended after {self._position} batches and cannot be read again; give one that goes on, "
                "fewer steps, or an object that can be iterated again, such as a DataLoader"
            )
        # Copied: an iterator may refill its own arrays, while its batches wait in the queue or are read by devices.
        return jax.tree.map(np.array, host_arrays(found, where=f"batch {self._position}"))

    def _check_shapes(self, batch: Batch, k: int) -> None:
        if jax.tree.structure(batch) != jax.tree.structure(self._spec):
            raise DataError(
                f"batch {k} holds {', '.join(batch)}, but batch 0 {', '.join(self._spec)}; give equal entries"
            )
        for (path, leaf), wanted in zip(
            jax.tree_util.tree_leaves_with_path(batch), jax.tree.leaves(self._spec), strict=True
        ):
            if leaf.shape != wanted.shape:
                raise DataError(
                    f"batch {k} holds {path_name(path)} {list(leaf.shape)}, but batch 0 {list(wanted.shape)}; "
                    "give batches of one shape: leave out an incomplete last one (drop_last=True)"
                )


def _check_unread(iterator: Iterable[Any]) -> None:
    """Raises a DataError at the second call for an iterator: its first batches are gone, and would be skipped twice."""
    if id(iterator) in _READ_FROM:
        raise DataError(
            f"an earlier call has read from this iterator ({type(iterator).__name__}), so its first batches are gone; "
            "give a fresh one, or an object that can be iterated again, such as a DataLoader"
        )
    with contextlib.suppress(TypeError):
        _READ_FROM[id(iterator)] = iterator


def _num_rows(spec: Batch) -> int:
    """Returns the number of rows of a batch; entries without dimensions are for all rows.

    Raises:
        DataError: It differs between the entries, as it does where single rows are taken for batches.
    """
    leaves = jax.tree_util.tree_leaves_with_path(spec)
    counts = {path_name(path): leaf.shape[0] for path, leaf in leaves if leaf.ndim}
    targets = spec.get("targets")
    is_row = isinstance(targets, jax.ShapeDtypeStruct) and not targets.ndim
    if is_row or len(set(counts.values())) != 1:
        shown = ", ".join(f"{path_name(path)} {list(leaf.shape)}" for path, leaf in leaves) or "nothing"
        raise DataError(
            f"batch 0 holds {shown}, which is no number of rows; an iterable gives whole batches [B, ...]: batch its "
            "rows first (torch: DataLoader(dataset, batch_size=32)), or give a dataset with __len__ and __getitem__"
        )
    return next(iter(counts.values()))


def named_entries(value: Any) -> Any:
    """Returns a named tuple as a dict of its entries, and anything else as it is."""
    as_dict = getattr(value, "_asdict", None)
    return as_dict() if isinstance(value, tuple) and as_dict is not None else value


def host_arrays(value: Any, *, where: str) -> Batch:
    """Returns a row or a batch as a dict of NumPy arrays.

    Args:
        value: A dict or a named tuple of arrays, numbers, tensors or nested dicts of them, or a pair (inputs, targets).
        where: The row or batch, in messages.

    Raises:
        DataError: It is something else, or holds text or other objects.
    """
    value = named_entries(value)
    if isinstance(value, (tuple, list)) and len(value) == 2 and type(value) in (tuple, list):
        value = {"inputs": value[0], "targets": value[1]}
    if not isinstance(value, Mapping):
        shown = f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
        raise DataError(
            f"{where} is a {shown}, not a dict of arrays; give {{'inputs': ..., 'targets': ...}} or a pair "
            "(inputs, targets)"
        )
    return {str(name): _host(entry, f"{where} holds {name!r}") for name, entry in value.items()}


def _host(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _host(entry, f"{where}.{name}") for name, entry in value.items()}
    if isinstance(value, tuple) and type(value) is not tuple:  # a named tuple of arrays, as graph libraries have them
        return type(value)(*(_host(entry, where) for entry in value))
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(f"{where}, which cannot become an array ({reason}); give numbers of one shape") from None
    if array.dtype.kind in "OUSMm":
        kind = "text" if array.dtype.kind in "US" else type(value).__name__ if array.ndim == 0 else array.dtype.name
        raise DataError(f"{where} of type {kind}, which is no number; leave the entry out, or turn it into numbers")
    return array
