"""The rows of a batch that make its loss or gradients not finite: found by halves."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.layout.sharding import path_name
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep
from jaxtrain.train.update import MeanGradients

_MOST_ROWS = 8
# Each is a forward and a backward pass; one row of 1,024 takes 20.
_MOST_TRIES = 64


def rows_at_fault(step: TrainStep, state: TrainState, batch: Any) -> list[tuple[int, list[str]]]:
    """Places of rows in a batch, and the entries of each that hold numbers that are not finite.

    Rows with such numbers are named at once. Where there are none, gradients are computed again for halves of the
    batch, in which the other rows are replaced by one of the half; batches whose rows are harmless on their own give
    none.

    Args:
        step: of the run.
        state: at which the batch is not finite; not donated.
        batch: on the mesh.
    """
    bad: dict[int, list[str]] = {}
    for name, places in _not_finite(step, batch).items():
        for place in places:
            bad.setdefault(place, []).append(name)
    if bad:
        return sorted(bad.items())[:_MOST_ROWS]
    return [(place, []) for place in _Halves(step, state, batch).search()]


def _not_finite(step: TrainStep, batch: Any) -> dict[str, list[int]]:
    """Entry -> places of the rows in which it is not finite."""

    def marked(batch: Any) -> dict[str, jax.Array]:
        return {
            path_name(path): jnp.any(~jnp.isfinite(leaf), axis=tuple(range(1, leaf.ndim)))
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
            if leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.floating)
        }

    everywhere = NamedSharding(step.mesh, PartitionSpec())
    found = jax.device_get(jax.jit(marked, out_shardings=everywhere)(batch))
    return {name: np.flatnonzero(rows).tolist() for name, rows in found.items() if rows.any()}


class _Halves:
    """The search among the rows of one batch."""

    def __init__(self, step: TrainStep, state: TrainState, batch: Any) -> None:
        self._step, self._state, self._batch = step, state, batch
        self._size = next(leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, batch)
        self._take = jax.jit(
            lambda batch, places: jax.tree.map(lambda leaf: leaf[places] if leaf.ndim else leaf, batch),
            out_shardings=shardings,
        )
        self._everywhere = NamedSharding(step.mesh, PartitionSpec())
        self._is_finite = jax.jit(_is_finite, out_shardings=self._everywhere)
        self._tries = 0

    def search(self) -> list[int]:
        found: list[int] = []
        waiting = [range(self._size)]
        while waiting and len(found) < _MOST_ROWS:
            part = waiting.pop()
            if len(part) == 1:
                found.append(part[0])
                continue
            half = len(part) // 2
            # The later half first, so that the earlier one is searched before it.
            waiting += [rows for rows in (part[half:], part[:half]) if self._is_bad(rows)]
        return found

    def _is_bad(self, rows: Sequence[int]) -> bool:
        if self._tries == _MOST_TRIES:
            return False
        self._tries += 1
        # Each row of the half stays at its place, where it meets the same random numbers.
        places = np.full(self._size, rows[0], np.int32)
        places[list(rows)] = rows
        # Awaited: with two programs in flight, emulated devices can wait for each other for ever.
        batch = jax.block_until_ready(self._take(self._batch, jax.device_put(places, self._everywhere)))
        return not bool(self._is_finite(self._step.gradients(self._state, batch)))


def _is_finite(found: MeanGradients) -> jax.Array:
    norm = optax.tree.norm(found.tree)
    # Without weight there is no mean.
    return jnp.isfinite(norm) & (jnp.isfinite(found.loss) | (found.weight == 0))
