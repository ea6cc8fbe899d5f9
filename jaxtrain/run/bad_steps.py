"""Numbers that go wrong: spikes, steps that are not finite, and copies of an array that differ between devices.

What looks into a step that was not finite runs after such a step and never otherwise: the batch is read again by its
number, and its gradients are computed by a program of their own, while the next step is under way, so that the
parameters may be one update later; the file says so.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.digest import shard_sums
from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.config.schema import SpikesConfig
from jaxtrain.data.row_names import row_name
from jaxtrain.data.stream import BatchStream
from jaxtrain.errors import CorruptionError
from jaxtrain.layout.rules import counting_dims
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.time_spent import TimeSpent
from jaxtrain.models.task import Batch
from jaxtrain.run.resume import SpikeError, batch_of, recorded
from jaxtrain.run.saving import is_due
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.tree import path_name
from jaxtrain.train.assemble import Run
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep
from jaxtrain.train.update import Metrics

# Lines and files of one process; after these the counts of skipped steps go on alone.
_MOST_SHOWN = 10
# Arrays, rows and devices that a line names, and those that a file does.
_SHOWN, _LISTED = 3, 20


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
        self._shown = 0

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
        try:
            if state is not None and numbers is not None:
                # An iterable gives no batch twice: of its steps only the metrics are known.
                found |= self._looked_into(number, state, run.step.loader(run.batches)(k), numbers)
        except jax.errors.JaxRuntimeError as error:  # the memory for the gradients, most likely
            found["error"] = str(error).splitlines()[0]
        path = self._run_dir / "nonfinite" / f"step_{number}.json"
        if jax.process_index() == 0:
            # No run is lost over a file that helps to understand it.
            with contextlib.suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                write_json_atomic(path, found)
        return _line(found, path)

    def _looked_into(self, number: int, state: TrainState, batch: Any, numbers: np.ndarray) -> dict[str, Any]:
        found: dict[str, Any] = {"parameters_of_step": int(state.step)}
        # The random numbers of the step that is looked into.
        state = replace(state, step=jax.device_put(np.int32(number - 1), state.step.sharding))
        gradients = self._run.step.gradients(state, batch).tree
        trees = {"parameters": state.params, "model_state": state.model_state, "gradients": gradients}
        found |= {name: self._table(tree) for name, tree in trees.items()}
        found["rows"] = []
        if not found["parameters"] and not found["model_state"]:  # else every row would be at fault
            for place, entries in self._rows_with(batch)[:_LISTED]:
                index = int(numbers[place])
                source = row_name(self._run.data.train, index)
                found["rows"].append({"place": place, "not_finite": entries, "row": index, "source": source})
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


def _line(found: Mapping[str, Any], path: Path) -> str:
    said = f"step {found['step']} is not finite and skipped (loss {found['loss']:.4g}): batch {found['batch']}"
    if found.get("rows"):
        said += f", row {_listed(map(_row_text, found['rows']))}"
    for kind in ("parameters", "model_state", "gradients"):
        if found.get(kind):
            said += f"; not finite in {kind.replace('_', ' ')}: {_listed(map(_array_text, found[kind]))}"
    return f"{said}; {path}"


def _row_text(row: Mapping[str, Any]) -> str:
    parts = [*filter(None, [row["source"]]), *(f"{entry} not finite" for entry in row["not_finite"])]
    return f"{row['row']} ({', '.join(parts)})"


def _array_text(row: Mapping[str, Any]) -> str:
    at = f"[{','.join(map(str, row['layers'][0]))}]" if row.get("layers") else ""
    return f"{row['path']}{at} ({row['count']:,} of {row['of']:,})"


def _listed(texts: Iterable[str]) -> str:
    shown = list(texts)
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


class CheckedStep:
    """A step after which, at multiples of `every`, all copies of each array must have the same bits on all devices.

    One program digests the whole state, compiled at its first use: it reads every array once.

    Args:
        step: compiled.
        every: steps between comparisons.
        start: steps done before the first call.
    """

    def __init__(self, step: TrainStep, every: int, *, start: int) -> None:
        self._step, self._every, self._number, self._checked = step, every, start, 0
        leaves = jax.tree_util.tree_leaves_with_path(step.abstract_state)
        self._devices = list(step.mesh.devices.flat)
        self._paths = [path_name(path) for path, _ in leaves]
        self._groups = [_groups(leaf.sharding, leaf.shape, self._devices) for _, leaf in leaves]
        self._digests = _digest_program([leaf.sharding.spec for _, leaf in leaves], step.state_on_host, step.mesh)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step.

        Raises:
            CorruptionError: devices hold other bits of the same array; names the first such array and the devices.
        """
        self._number += 1
        state, metrics = self._step(state, batch)
        if is_due(self._number, self._every):
            self._check_copies(state)
            self._checked = self._number
        return state, metrics

    def _check_copies(self, state: TrainState) -> None:
        # Awaited: with two programs in flight, emulated devices can wait for each other for ever.
        digests = np.asarray(self._digests(jax.block_until_ready(state)).addressable_data(0))
        for i, path in enumerate(self._paths):
            for group in self._groups[i]:
                values = [tuple(digests[place, i].tolist()) for place in group]
                usual, count = Counter(values).most_common(1)[0]
                if count == len(group):
                    continue
                # Without a majority (two replicas) all are named.
                is_known = 2 * count > len(group)
                places = [p for p, value in zip(group, values, strict=True) if value != usual or not is_known]
                which = f"{self._named(places)} {'other bits than the rest' if is_known else 'different bits'}"
                since = f"they were equal after step {self._checked}" if self._checked else "since when is not known"
                raise CorruptionError(
                    f"after step {self._number} the copies of {path} differ: {which}, which is silent corruption; "
                    f"{since}: delete the checkpoints that may hold it, and run again without that device"
                )

    def _named(self, places: Sequence[int]) -> str:
        """Devices of the mesh as the subject of a sentence: `device 3 (process 0) holds`."""
        shown = [f"{self._devices[i].id} (process {self._devices[i].process_index})" for i in places]
        return f"device {shown[0]} holds" if len(places) == 1 else f"devices {_listed(shown)} hold"


def _digest_program(specs: Sequence[PartitionSpec], on_host: Any, mesh: Mesh) -> Callable[[TrainState], jax.Array]:
    """A program that gives digests of what each device holds of each array: uint32 [devices, arrays, 2]."""

    def on_device(*shards: jax.Array) -> jax.Array:
        return jax.lax.all_gather(jnp.stack([jnp.stack(shard_sums(shard)) for shard in shards]), mesh.axis_names)

    # What is replicated is read by each device from its own memory: inside `shard_map` nothing else is known of it.
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=tuple(specs), out_specs=PartitionSpec(), check_vma=False)

    def digests(state: TrainState) -> jax.Array:
        arrays = []
        for leaf, is_far in zip(jax.tree.leaves(state), jax.tree.leaves(on_host), strict=True):
            near = jax.device_put(leaf, jax.memory.Space.Device) if is_far else leaf
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            arrays.append(jax.random.key_data(near) if is_key else near)
        return mapped(*arrays)

    return jax.jit(digests)


def _groups(sharding: jax.sharding.Sharding, shape: tuple[int, ...], devices: Sequence[Any]) -> list[list[int]]:
    """Positions of the devices that hold the same part of an array."""
    parts, groups = sharding.devices_indices_map(shape), {}
    for position, device in enumerate(devices):
        groups.setdefault(str(parts[device]), []).append(position)
    return list(groups.values())
