"""Batches by index: batch k is a pure function of (rows, seed, k) on any number of processes and devices."""

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxtrain.cores import usable_cores
from jaxtrain.data.permutation import permuted
from jaxtrain.errors import DataError

if TYPE_CHECKING:
    import grain

# Beyond this many threads the interpreter lock, not decoding, is what rows wait for.
_MAX_WORKERS = 16

Batch = dict[str, jax.Array]


class Batches:
    """Batch k as a pure function of (rows, seed, k); each process loads only rows its devices need.

    In training (`shuffle`) the batches never end: batch k holds positions k * B to k * B + B - 1 of an endless order
    in which each epoch is another permutation of the rows (a mixture brings its own order, by weight); a random
    transformation of grain sees the position's epoch and row, so it draws anew each epoch and the same everywhere.
    In evaluation batch k holds rows k * B to k * B + B - 1; the last one is filled up with row 0, and an entry
    "weights" (float32, [B] or, for tokens, [B, L]) is 1 for rows that count and 0 for the filling.

    Args:
        rows: Finite rows, unshuffled: dicts of arrays.
        global_batch_size: B, rows of a batch over all processes.
        seed: Decides the order in training.
        shuffle: True for training, False for evaluation.
        workers: Threads that read rows one by one (images); None: as many as this process has cores, up to 16. Rows
            that come a batch at once (tokens, tables) take none. Batches do not depend on it.
    """

    def __init__(
        self,
        rows: "grain.MapDataset",
        global_batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        workers: int | None = None,
    ):
        # Imported here because grain takes a quarter of a second that `import jaxtrain.data` need not.
        from jaxtrain.data.rows import Rows

        if len(rows) == 0:
            raise DataError("the data has no rows; give data with at least one row")
        self._rows = rows
        self._read = rows.gather if isinstance(rows, Rows) else self._read_one_by_one
        self._size = global_batch_size
        self._workers = workers or default_workers()
        self._order = None
        if shuffle:
            self._order = (
                rows.order(seed)
                if isinstance(rows, Rows)
                else functools.partial(permuted, num_rows=len(rows), seed=seed)
            )
        self._example = {name: column[0] for name, column in self._read(np.array([0])).items()}

    def __len__(self) -> int:
        return -(-len(self._rows) // self._size)

    def spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the global shapes and dtypes of a batch, batch dimension first."""
        spec = {
            # As JAX will hold it: 64-bit rows become 32-bit unless x64 is enabled.
            name: jax.ShapeDtypeStruct((self._size, *value.shape), jax.dtypes.canonicalize_dtype(value.dtype))
            for name, value in self._example.items()
        }
        if self._order is None:
            spec["weights"] = jax.ShapeDtypeStruct((self._size, *self._weight_shape), np.float32)
        return spec

    @property
    def _weight_shape(self) -> tuple[int, ...]:
        targets = self._example["targets"]
        # Integer targets with a dimension are one a token; everything else counts by row.
        return targets.shape if np.issubdtype(targets.dtype, np.integer) else ()

    def load(self, k: int, shardings: Mapping[str, jax.sharding.Sharding]) -> Batch:
        """Reads batch k.

        Args:
            k: Number of the batch, from 0; below `len(self)` in evaluation.
            shardings: How each entry of `spec()` is laid out.

        Returns:
            Global arrays; this process has read only the rows of its own devices, each once.
        """
        assert k >= 0, k
        assert self._order is not None or k < len(self), k
        spec = self.spec()
        needed = _needed_rows(spec, shardings)
        local = {
            name: column.astype(spec[name].dtype, copy=False) for name, column in self._load_rows(k, needed).items()
        }
        if all(len(shardings[name].device_set) == 1 for name in local):
            return jax.device_put(local, {name: shardings[name] for name in local})
        return {
            name: jax.make_array_from_callback(
                spec[name].shape, shardings[name], _Window(column, needed), dtype=column.dtype
            )
            for name, column in local.items()
        }

    def _load_rows(self, k: int, needed: np.ndarray) -> dict[str, np.ndarray]:
        positions = k * self._size + needed
        if self._order is not None:
            num_rows = len(self._rows)
            numbers = self._order(positions)
            # The epoch stays in the index, so that random transformations draw anew in each.
            return self._read(numbers + positions // num_rows * num_rows)
        real = positions < len(self._rows)
        local = self._read(np.where(real, positions, 0))
        weights = real.astype(np.float32).reshape(-1, *[1] * len(self._weight_shape))
        local["weights"] = np.broadcast_to(weights, (len(needed), *self._weight_shape))
        return local

    def _read_one_by_one(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        # Decoders of images release the interpreter lock; a pool a call leaves no thread behind.
        with ThreadPoolExecutor(max(1, min(len(indices), self._workers))) as pool:
            rows: list[Any] = list(pool.map(self._rows.__getitem__, indices.tolist()))
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def default_workers() -> int:
    """The cores that this process may use, up to 16."""
    return min(usable_cores(), _MAX_WORKERS)


def _needed_rows(
    spec: Mapping[str, jax.ShapeDtypeStruct], shardings: Mapping[str, jax.sharding.Sharding]
) -> np.ndarray:
    """Returns the rows of a batch that this process's devices hold, sorted, each once."""
    size = next(iter(spec.values())).shape[0]
    wanted = np.zeros(size, bool)
    for name, leaf in spec.items():
        for index in shardings[name].addressable_devices_indices_map(leaf.shape).values():
            wanted[index[0] if index else slice(None)] = True
    return np.flatnonzero(wanted)


class _Window:
    """Answers for slices of a global array from the rows this process has read."""

    def __init__(self, column: np.ndarray, rows: np.ndarray):
        self._column = column
        self._rows = rows

    def __call__(self, index: Any) -> np.ndarray:
        start = index[0].start or 0
        stop = int(self._rows[-1]) + 1 if index[0].stop is None else index[0].stop
        first, last = np.searchsorted(self._rows, [start, stop])
        assert last - first == stop - start, "a device asks for rows that were not read"
        return self._column[(slice(first, last), *index[1:])]
