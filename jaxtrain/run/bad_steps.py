"""What follows a step that left the state as it was: a spike is said or undone, a non-finite one is looked into.

The step itself only says that it was not finite. What looks into it runs after such a step and never otherwise: the
batch is read again by its number, and its gradients are computed by a program of their own. When that is asked for, the
next step is under way, so that the parameters may be one update later; the file says so.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.config.schema import SpikesConfig
from jaxtrain.data.row_names import row_name
from jaxtrain.data.stream import BatchStream
from jaxtrain.layout.state_entries import counting_dims
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.time_spent import TimeSpent
from jaxtrain.run.resume import SpikeError, batch_of, recorded
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.tree import path_name
from jaxtrain.train.assemble import Run
from jaxtrain.train.state import TrainState
from jaxtrain.train.update import MeanGradients

# Lines and files of one process; after these the counts of skipped steps go on alone.
_MOST_SHOWN = 10
# Arrays and rows that a line or a file names.
_SHOWN, _LISTED = 3, 20
_MOST_ROWS = 8
# Each is a forward and a backward pass; one row of 1,024 takes 20.
_MOST_TRIES = 64


class BadSteps:
    """Looks at the metrics of every step once it is done. Every process calls it, in the same order.

    Args:
        run: what is trained.
        run_dir: of the run; the main process writes `nonfinite/step_N.json` there.
        checkpointer: of the run.
        settle: waits for the save that is under way.
        metadata: of the next checkpoint, with the roll backs of the run.
        progress: what people see.
        spent: where the time goes.
    """

    def __init__(
        self,
        run: Run,
        run_dir: Path,
        *,
        checkpointer: Checkpointer,
        settle: Callable[[], object],
        metadata: Mapping[str, Any],
        progress: Progress,
        spent: TimeSpent,
    ) -> None:
        self._spent, self._settle, self._run_dir = spent, settle, run_dir
        self._run, self._checkpointer, self._metadata, self._progress = run, checkpointer, metadata, progress
        self._everywhere = NamedSharding(run.step.mesh, PartitionSpec())
        self._counts = jax.jit(self._counted, out_shardings=self._everywhere)
        self._is_finite = jax.jit(_is_finite, out_shardings=self._everywhere)
        # An iterable gives no batch twice: its last two are kept, since a step is looked at during the next one.
        self._kept: dict[int, Any] = {}
        self._shown = 0

    def following(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        """The batches of the steps from `first` on; of an iterable, which gives none twice, the last two are kept."""
        return self._keeping(batches, first) if isinstance(self._run.batches, BatchStream) else batches

    def _keeping(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, first):
            self._kept = {at: kept for at, kept in self._kept.items() if at == number - 1} | {number: batch}
            yield batch

    def note(self, number: int, metrics: Mapping[str, jax.Array]) -> float:
        """Look at the metrics of a step that is done.

        Returns:
            Seconds of it that count as compiling, and as no step.

        Raises:
            SpikeError: it was a spike, and the run is to go back.
        """
        spikes = self._run.config.spikes
        if spikes is not None and int(metrics["spiked"]):
            self._spiked(spikes, number, float(metrics["loss"]), float(metrics["grad_norm"]))
            return 0.0
        # A batch without weight is skipped without a fault.
        is_empty = float(metrics["weight"]) == 0 and float(metrics["grad_norm"]) == 0
        if not int(metrics["skipped_in_a_row"]) or self._shown == _MOST_SHOWN or is_empty:
            return 0.0
        self._shown += 1
        began = time.monotonic()
        with self._spent.measure("compiling"):
            self._progress.message(self._explained(number, metrics))
        return time.monotonic() - began

    def _spiked(self, spikes: SpikesConfig, number: int, loss: float, grad_norm: float) -> None:
        rolled_back = recorded(self._metadata)
        what = (
            f"step {number} is a spike: loss {loss:.4g}, gradient norm {grad_norm:.4g}, more than {spikes.sigmas:g} "
            f"deviations above the last {spikes.window} steps"
        )
        why = ""
        if spikes.action == "roll_back" and len(rolled_back) >= spikes.max_roll_backs:
            why = f" (spikes.max_roll_backs={spikes.max_roll_backs} are done)"
        elif spikes.action == "roll_back":
            to_step = self._step_before(number - spikes.roll_back_steps)
            if to_step is not None:
                self._progress.message(f"{what}; going back to step {to_step}")
                raise SpikeError(number, loss, grad_norm, to_step=to_step)
            why = f" (no checkpoint is {spikes.roll_back_steps} steps before it)"
        self._shown += 1
        if self._shown <= _MOST_SHOWN:
            self._progress.message(f"{what}; batch {batch_of(number - 1, rolled_back)} is skipped{why}")

    def _step_before(self, last: int) -> int | None:
        """The newest checkpoint of this line of steps up to a step; None: there is none."""
        # A save that is still being written counts: which step a run goes back to must not depend on the disk.
        self._settle()
        rolled_back = recorded(self._metadata)
        after = rolled_back[-1].to_step if rolled_back else 0

        def newest() -> int:
            for step in reversed(self._checkpointer.steps()):
                # Steps of an abandoned line are there until the first save of the one that took its place.
                is_ours = step <= after or recorded(self._checkpointer.metadata(step)) == rolled_back
                if step <= last and (not rolled_back or is_ours):
                    return step
            return -1

        found = from_process_0(newest)
        return None if found < 0 else found

    def _explained(self, number: int, metrics: Mapping[str, jax.Array]) -> str:
        """One line on a step that was not finite; the rest goes into its file."""
        run, k = self._run, batch_of(number - 1, recorded(self._metadata))
        numbers = None if isinstance(run.batches, BatchStream) else run.batches.row_numbers(k)
        listed = None if numbers is None else numbers.tolist()
        found: dict[str, Any] = {"step": number, "batch": k, "batch_rows": listed}
        found |= {name: float(metrics[name]) for name in ("loss", "grad_norm", "loss_scale") if name in metrics}
        state = run.step.last_state()
        batch = self._kept.get(number) if numbers is None else run.step.loader(run.batches)(k)
        try:
            if state is not None and batch is not None:
                found |= self._looked_into(number, state, batch, numbers)
        except jax.errors.JaxRuntimeError as error:  # the memory for the gradients, most likely
            found["error"] = str(error).splitlines()[0]
        path = self._run_dir / "nonfinite" / f"step_{number}.json"
        if jax.process_index() == 0:
            # No run is lost over a file that helps to understand it.
            with contextlib.suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                write_json_atomic(path, found)
        return _line(found, path)

    def _looked_into(self, number: int, state: TrainState, batch: Any, numbers: np.ndarray | None) -> dict[str, Any]:
        step = self._run.step
        found: dict[str, Any] = {"parameters_of_step": int(state.step)}
        # The random numbers of the step that is looked into.
        state = replace(state, step=jax.device_put(np.int32(number - 1), state.step.sharding))
        gradients = step.gradients(state, batch)
        trees = {"parameters": state.params, "model_state": state.model_state, "gradients": gradients.tree}
        found |= {name: self._table(tree) for name, tree in trees.items()}
        found["found_again"] = not bool(self._is_finite(gradients))
        del gradients, trees
        if found["parameters"] or found["model_state"] or not found["found_again"]:
            return found  # every row would be at fault, or none
        rows = self._rows_with(batch)
        rows = rows or [(place, []) for place in self._search(state, batch)]
        found["rows"] = []
        for place, entries in rows[:_MOST_ROWS]:
            row: dict[str, Any] = {"place": place, "not_finite": entries}
            if numbers is not None:
                row |= {"row": int(numbers[place]), "source": row_name(self._run.data.train, int(numbers[place]))}
            found["rows"].append(row)
        return found

    def _counted(self, tree: Any) -> dict[str, jax.Array]:
        """Path -> how many numbers are not finite, int32 by the dims that count layers and experts."""
        model = self._run.step.model
        stack = None if model.parts is None else model.parts.stack
        found = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                name = path_name(path)
                layers = counting_dims(name, leaf.shape, model.axes, stack=stack)
                rest = tuple(dim for dim in range(leaf.ndim) if dim not in layers)
                found[name] = jnp.sum(~jnp.isfinite(leaf), axis=rest, dtype=jnp.int32)
        return found

    def _table(self, tree: Any) -> list[dict[str, Any]]:
        """The first arrays of a tree that hold numbers that are not finite."""
        sizes = {path_name(path): leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        rows = []
        for name, counts in jax.device_get(self._counts(tree)).items():
            if counts.any():
                row = {"path": name, "count": int(counts.sum()), "of": sizes[name]}
                layers = {"layers": [list(map(int, at)) for at in np.argwhere(counts)]} if counts.ndim else {}
                rows.append(row | layers)
        return rows[:_LISTED]

    def _rows_with(self, batch: Any) -> list[tuple[int, list[str]]]:
        """Places of the rows that hold numbers that are not finite, and the entries that do."""

        def marked(batch: Any) -> dict[str, jax.Array]:
            return {
                path_name(path): jnp.any(~jnp.isfinite(leaf), axis=tuple(range(1, leaf.ndim)))
                for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
                if leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.floating)
            }

        found: dict[int, list[str]] = {}
        for name, rows in jax.device_get(jax.jit(marked, out_shardings=self._everywhere)(batch)).items():
            for place in np.flatnonzero(rows).tolist():
                found.setdefault(place, []).append(name)
        return sorted(found.items())

    def _search(self, state: TrainState, batch: Any) -> list[int]:
        """Places of the rows that make the gradients not finite: found by halves, whose other rows are replaced."""
        size = next(leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim)
        take = jax.jit(
            lambda batch, places: jax.tree.map(lambda leaf: leaf[places] if leaf.ndim else leaf, batch),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, batch),
        )

        def is_bad(rows: Sequence[int]) -> bool:
            # Each row of the half stays at its place, where it meets the same random numbers.
            places = np.full(size, rows[0], np.int32)
            places[list(rows)] = rows
            # Awaited: with two programs in flight, emulated devices can wait for each other for ever.
            half = jax.block_until_ready(take(batch, jax.device_put(places, self._everywhere)))
            return not bool(self._is_finite(self._run.step.gradients(state, half)))

        found: list[int] = []
        waiting, tries = [range(size)], 0
        while waiting and len(found) < _MOST_ROWS and tries < _MOST_TRIES:
            part = waiting.pop()
            if len(part) == 1:
                found.append(part[0])
                continue
            half = len(part) // 2
            # The later half first, so that the earlier one is searched before it.
            waiting += [rows for rows in (part[half:], part[:half]) if is_bad(rows)]
            tries += 2
        return found


def _is_finite(gradients: MeanGradients) -> jax.Array:
    # Without weight there is no mean.
    is_loss = jnp.isfinite(gradients.loss) | (gradients.weight == 0)
    return jnp.isfinite(optax.tree.norm(gradients.tree)) & is_loss


def _line(found: Mapping[str, Any], path: Path) -> str:
    said = f"step {found['step']} is not finite and skipped (loss {found['loss']:.4g}): batch {found['batch']}"
    if found.get("rows"):
        said += f", row {_listed(map(_row_text, found['rows']))}"
    for kind in ("parameters", "model_state", "gradients"):
        if found.get(kind):
            said += f"; not finite in {kind.replace('_', ' ')}: {_listed(map(_array_text, found[kind]))}"
    return f"{said}; {path}"


def _row_text(row: Mapping[str, Any]) -> str:
    name = f"{row['row']}" if "row" in row else f"{row['place']} of the batch"
    parts = [*filter(None, [row.get("source")]), *(f"{entry} not finite" for entry in row["not_finite"])]
    return f"{name} ({', '.join(parts)})" if parts else name


def _array_text(row: Mapping[str, Any]) -> str:
    at = f"[{','.join(map(str, row['layers'][0]))}]" if row.get("layers") else ""
    return f"{row['path']}{at} ({row['count']:,} of {row['of']:,})"


def _listed(texts: Iterator[str]) -> str:
    shown = list(texts)
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
