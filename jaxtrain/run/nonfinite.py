"""Why a step was not finite: its rows, and the parameters and gradients that are not, by layer.

The step itself only says that it was not finite. What is here runs after such a step and never otherwise: the batch is
read again by its number, and its gradients are computed by a program of their own. When that is asked for, the next
step is under way, so that the parameters may be one update later; the file says so.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.data.row_names import row_name
from jaxtrain.data.stream import BatchStream
from jaxtrain.layout.sharding import path_name
from jaxtrain.layout.state_entries import counting_dims
from jaxtrain.run.culprits import rows_at_fault
from jaxtrain.runtime.files import strict_json, write_json_atomic
from jaxtrain.train.assemble import Run
from jaxtrain.train.state import TrainState

FOLDER = "nonfinite"
# Arrays and rows that a line or a file names.
_SHOWN = 3
_LISTED = 20


class Diagnosis:
    """Looks into steps that were not finite. Every process calls every method, in the same order.

    Args:
        run: what is trained.
        run_dir: of the run; the main process writes `nonfinite/step_N.json` there.
        batch: number of a step, counted from 1 -> number of its batch.
    """

    def __init__(self, run: Run, run_dir: Path, *, batch: Callable[[int], int]) -> None:
        self._run, self._run_dir, self._batch = run, run_dir, batch
        # An iterable gives no batch twice: its last two are kept, since a step is looked at during the next one.
        self._keeps = isinstance(run.batches, BatchStream)
        self._kept: dict[int, Any] = {}
        everywhere = NamedSharding(run.step.mesh, PartitionSpec())
        self._counts = jax.jit(self._counted, out_shardings=everywhere)
        self._largest = jax.jit(_largest, out_shardings=everywhere)

    def following(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        """The batches of the steps from `first` on; see `BadSteps.following`."""
        return self._keeping(batches, first) if self._keeps else batches

    def _keeping(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, first):
            self._kept = {at: kept for at, kept in self._kept.items() if at == number - 1} | {number: batch}
            yield batch

    def __call__(self, number: int, metrics: Mapping[str, jax.Array]) -> str:
        """One line on a step that was not finite; the rest goes into its file.

        Args:
            number: of the step.
            metrics: of the step.
        """
        step, k = self._run.step, self._batch(number)
        names = ("loss", "grad_norm", "loss_scale")
        found: dict[str, Any] = {"step": number, "batch": k}
        found |= {name: float(metrics[name]) for name in names if name in metrics}
        numbers = None if isinstance(self._run.batches, BatchStream) else self._run.batches.row_numbers(k)
        found["batch_rows"] = None if numbers is None else numbers.tolist()
        state = step.last_state()
        try:
            if state is not None:
                found |= self._looked_into(number, state, numbers)
        except jax.errors.JaxRuntimeError as error:  # the memory for the gradients, most likely
            found["error"] = str(error).splitlines()[0]
        path = self._run_dir / FOLDER / f"step_{number}.json"
        if jax.process_index() == 0:
            # No run is lost over a file that helps to understand it.
            with contextlib.suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                write_json_atomic(path, strict_json(found))
        return _line(found, path)

    def _looked_into(self, number: int, state: TrainState, numbers: np.ndarray | None) -> dict[str, Any]:
        step, done = self._run.step, int(state.step)
        batch = self._kept.get(number) if numbers is None else step.loader(self._run.batches)(self._batch(number))
        if batch is None:
            return {}
        # The random numbers of the step that is looked into.
        state = replace(state, step=jax.device_put(np.int32(number - 1), state.step.sharding))
        gradients = step.gradients(state, batch)
        weighs = float(gradients.weight) != 0
        loss = float(gradients.loss) if weighs else 0.0
        tables = {
            "parameters": self._table(state.params),
            "model_state": self._table(state.model_state),
            "gradients": self._table(gradients.tree),
        }
        largest, norm = jax.device_get(self._largest(gradients.tree))
        del gradients
        again = not np.isfinite(loss) or not np.isfinite(norm)
        ranked = sorted(largest.items(), key=lambda row: -row[1])[:_LISTED]
        tables["largest_gradients"] = [{"path": path, "largest": float(value)} for path, value in ranked]
        found = {"parameters_of_step": done, "found_again": again, "loss_found_again": loss, **tables}
        if tables["parameters"] or tables["model_state"]:
            return found  # every row would be at fault
        rows = rows_at_fault(step, state, batch) if again else []
        found["rows"] = [
            {"place": place}
            | ({} if numbers is None else {"row": int(numbers[place])})
            | ({} if numbers is None else {"source": row_name(self._run.data.train, int(numbers[place]))})
            | ({"not_finite": entries} if entries else {})
            for place, entries in rows
        ]
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
        return [*rows[:_LISTED], *([{"and_more": len(rows) - _LISTED}] if len(rows) > _LISTED else [])]


def _largest(tree: Any) -> tuple[dict[str, jax.Array], jax.Array]:
    """Path -> largest magnitude among the finite numbers of an array; and the norm of all."""
    found = {
        path_name(path): jnp.max(jnp.abs(leaf), where=jnp.isfinite(leaf), initial=0)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    return found, optax.tree.norm(tree)


def _line(found: Mapping[str, Any], path: Path) -> str:
    said = f"step {found['step']} is not finite and skipped (loss {found['loss']:.4g}): batch {found['batch']}"
    rows = found.get("rows") or []
    if rows:
        shown = ", ".join(_row_text(row) for row in rows[:_SHOWN])
        said += f", {'row' if len(rows) == 1 else 'rows'} {shown}{_more(rows)}"
    for kind in ("parameters", "model_state", "gradients"):
        tables = [row for row in found.get(kind, []) if "path" in row]
        if tables:
            shown = ", ".join(_array_text(row) for row in tables[:_SHOWN])
            said += f"; not finite in {kind.replace('_', ' ')}: {shown}{_more(found[kind])}"
    if found.get("found_again") and not (found["gradients"] or found["parameters"] or found["model_state"]):
        largest = found["largest_gradients"][0]
        said += f"; the largest gradient is {largest['largest']:.3g} in {largest['path']}"
    if found.get("found_again") is False:
        said += f"; finite with the parameters of step {found['parameters_of_step']}, so that it was not the data alone"
    if "error" in found:
        said += f"; gradients could not be computed again ({found['error']})"
    return f"{said}; {path}"


def _row_text(row: Mapping[str, Any]) -> str:
    name = f"{row['row']}" if "row" in row else f"{row['place']} of the batch"
    source, entries = row.get("source"), row.get("not_finite")
    parts = [*([source] if source else []), *([f"{' and '.join(entries)} not finite"] if entries else [])]
    return f"{name} ({', '.join(parts)})" if parts else name


def _array_text(row: Mapping[str, Any]) -> str:
    layers = row.get("layers")
    at = f"[{','.join(map(str, layers[0]))}]" if layers else ""
    return f"{row['path']}{at} ({row['count']:,} of {row['of']:,})"


def _more(rows: list[Any]) -> str:
    total = len(rows) - 1 + rows[-1]["and_more"] if "and_more" in rows[-1] else len(rows)
    return f" and {total - _SHOWN} more" if total > _SHOWN else ""
