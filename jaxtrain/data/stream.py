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

# Iterators that were read from; an iterator that takes no weak reference is not remembered.
_READ_FROM: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class BatchStream:
    """Batches of an iterable, in its own order; it takes the place of rows with an index in `Data.train`.

    An iterable that can be read again (a DataLoader) is, when it ends; an iterator must last for the run.

    Args:
        batches: Each a dict of arrays, of nested dicts of arrays, or a pair (inputs, targets); all of one shape.

    Raises:
        DataError: There is no batch, or the first one is no dict of arrays.
    """

    def __init__(self, batches: Iterable[Any]):
        self._source = batches
        self._iterator = iter(batches)
        # Iterators return themselves; what does not can be read once more.
        self.restarts = self._iterator is not batches
        if not self.restarts:
            if id(batches) in _READ_FROM:
                raise DataError(
                    "an earlier call has read from this iterator: its first batches are gone; give a new one"
                )
            with contextlib.suppress(TypeError):
                _READ_FROM[id(batches)] = batches
        self._position = 0
        self._first: Batch | None = self._read()  # batch 0 as NumPy arrays; None once it was loaded
        self._spec = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)), self._first
        )
        self.batch_size = _num_rows(self._spec)

    def spec(self) -> dict[str, Any]:
        """Returns the shape and dtype of each entry of a batch."""
        return dict(self._spec)

    def load(self, k: int, shardings: Mapping[str, Any], *, check: Callable[[Batch], None] | None = None) -> Batch:
        """Reads batch k, not below that of the last call, and what was not read before it; see `Batches.load`.

        Raises:
            DataError: The iterator ended, or a batch has another shape than the first.
        """
        assert k >= self._position, (k, self._position)
        batch: Batch = {}
        while self._position <= k:
            batch = self._read() if self._first is None else self._first
            self._first = None
            self._position += 1
        found, wanted = (jax.tree_util.tree_leaves_with_path(one) for one in (batch, self._spec))
        for (path, leaf), (_, first) in zip(found, wanted, strict=False):
            if leaf.shape != first.shape:
                raise DataError(
                    f"batch {k} holds {path_name(path)} {list(leaf.shape)}, but batch 0 {list(first.shape)}; "
                    "leave out an incomplete last batch (drop_last=True)"
                )
        if check is not None:
            check(batch)
        batch = in_dtypes(batch, self._spec, where=f"batch {k} holds", first="batch 0")
        return jax.device_put(batch, {name: shardings[name] for name in batch})

    def _read(self) -> Batch:
        """Returns the next batch as a dict of NumPy arrays."""
        missing = object()
        found = next(self._iterator, missing)
        if found is missing and self.restarts:
            self._iterator = iter(self._source)
            found = next(self._iterator, missing)
        if found is missing:
            raise DataError(
                f"the iterator ended after {self._position} batches; give a longer one, fewer steps, or an object "
                "that can be iterated again, such as a DataLoader"
            )
        # Copied: an iterator may refill its own arrays, while its batches wait in the queue or are read by devices.
        return jax.tree.map(np.array, host_arrays(found, where=f"batch {self._position}"))


def _num_rows(spec: Batch) -> int:
    """Returns the number of rows of a batch; a DataError where entries differ, as they do in single rows."""
    leaves = jax.tree_util.tree_leaves_with_path(spec)
    counts = {leaf.shape[0] for _, leaf in leaves if leaf.ndim}
    targets = spec.get("targets")
    is_row = isinstance(targets, jax.ShapeDtypeStruct) and not targets.ndim
    if is_row or len(counts) != 1:
        shown = ", ".join(f"{path_name(path)} {list(leaf.shape)}" for path, leaf in leaves) or "nothing"
        raise DataError(
            f"batch 0 holds {shown}, which does not tell the number of rows; batch them first (DataLoader(dataset, "
            "batch_size=32)), or give a dataset with __len__ and __getitem__"
        )
    return next(iter(counts))


def named_entries(value: Any) -> Any:
    """Returns a named tuple as a dict of its entries, and anything else as it is."""
    as_dict = getattr(value, "_asdict", None)
    return as_dict() if isinstance(value, tuple) and as_dict is not None else value


def host_arrays(value: Any, *, where: str) -> Batch:
    """Returns a row or a batch as a dict of NumPy arrays; `where` it is from is for messages."""
    value = named_entries(value)
    if type(value) in (tuple, list) and len(value) == 2:
        value = {"inputs": value[0], "targets": value[1]}
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is a {type(value).__name__}; give {{'inputs': ..., 'targets': ...}} or such a pair")
    return {str(name): _host(entry, f"{where} {name!r}") for name, entry in value.items()}


def _host(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _host(entry, f"{where}.{name}") for name, entry in value.items()}
    if isinstance(value, tuple) and type(value) is not tuple:  # a named tuple of arrays, as graph libraries have them
        return type(value)(*(_host(entry, where) for entry in value))
    from jaxtrain.data.rows import as_numbers

    return as_numbers(value, where=where)
