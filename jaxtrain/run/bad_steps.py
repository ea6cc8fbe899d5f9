"""Numbers that go wrong: spikes, steps that are not finite, and copies of an array that differ between devices."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.checkpoint.digest import shard_sums
from jaxtrain.config.schema import SpikesConfig
from jaxtrain.data.stream import BatchStream
from jaxtrain.errors import CorruptionError
from jaxtrain.metrics.progress import Progress
from jaxtrain.models.task import Batch
from jaxtrain.run.session import is_due
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.tree import path_name
from jaxtrain.train.assemble import Run
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep
from jaxtrain.train.update import Metrics

# Lines and files of one process; after these the counts of skipped steps go on alone.
_MOST_SHOWN = 10
# Rows and devices that a line names, and rows that a file does.
_SHOWN, _LISTED = 3, 20


class BadSteps:
    """Looks at the metrics of every step once it is done. Every process calls it, in the same order."""

    def __init__(self, run: Run, run_dir: Path, progress: Progress) -> None:
        self._run, self._run_dir, self._progress, self._shown = run, run_dir, progress, 0

    def note(self, number: int, metrics: Mapping[str, jax.Array]) -> None:
        """Look at the metrics of a step that is done."""
        spikes = self._run.config.spikes
        if spikes is not None and int(metrics["spiked"]):
            self._spiked(spikes, number, float(metrics["loss"]), float(metrics["grad_norm"]))
            return
        # A batch without weight is skipped without a fault.
        is_empty = float(metrics["weight"]) == 0 and float(metrics["grad_norm"]) == 0
        if int(metrics["skipped_in_a_row"]) and self._shown < _MOST_SHOWN and not is_empty:
            self._shown += 1
            self._progress.message(self._explained(number, metrics))

    def _spiked(self, spikes: SpikesConfig, number: int, loss: float, grad_norm: float) -> None:
        self._shown += 1
        if self._shown <= _MOST_SHOWN:
            self._progress.message(
                f"step {number} is a spike: loss {loss:.4g}, gradient norm {grad_norm:.4g}, more than "
                f"{spikes.sigmas:g} deviations above the last {spikes.window} steps; batch {number - 1} is skipped"
            )

    def _explained(self, number: int, metrics: Mapping[str, jax.Array]) -> str:
        """One line on a step that was not finite, which its file says too."""
        run, k = self._run, number - 1
        found: dict[str, Any] = {"step": number, "batch": k}
        found |= {name: float(metrics[name]) for name in ("loss", "grad_norm", "loss_scale") if name in metrics}
        rows = []
        if not isinstance(run.batches, BatchStream):  # an iterable gives no batch twice
            numbers = run.batches.row_numbers(k)
            for place, entries in self._rows_with(run.step.loader(run.batches)(k))[:_LISTED]:
                index = int(numbers[place])
                rows.append({"place": place, "not_finite": entries, "row": index})
            found |= {"batch_rows": numbers.tolist(), "rows": rows}
        path = self._run_dir / "nonfinite" / f"step_{number}.json"
        if jax.process_index() == 0:
            # No run is lost over a file that helps to understand it.
            with contextlib.suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                write_json_atomic(path, found)
        said = f"step {number} is not finite and skipped (loss {found['loss']:.4g}): batch {k}"
        return f"{said}{f', row {_listed(map(_row_text, rows))}' if rows else ''}; {path}"

    def _rows_with(self, batch: Any) -> list[tuple[int, list[str]]]:
        """Places of the rows that hold numbers that are not finite, and the entries that do."""

        def marked(batch: Any) -> dict[str, jax.Array]:
            return {
                path_name(path): jnp.any(~jnp.isfinite(leaf), axis=tuple(range(1, leaf.ndim)))
                for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
                if leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.floating)
            }

        everywhere = NamedSharding(self._run.step.mesh, PartitionSpec())
        found = jax.device_get(jax.jit(marked, out_shardings=everywhere)(batch))
        places = sorted({place for rows in found.values() for place in np.flatnonzero(rows).tolist()})
        return [(place, [name for name, rows in found.items() if rows[place]]) for place in places]


def _row_text(row: Mapping[str, Any]) -> str:
    return f"{row['row']} ({', '.join(f'{entry} not finite' for entry in row['not_finite'])})"


def _listed(texts: Iterable[str]) -> str:
    shown = list(texts)
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


class CheckedStep:
    """A step after which, at multiples of `every`, all copies of each array must have the same bits on all devices.

    One program digests the whole state, compiled at its first use: it reads every array once. `start`: the steps done
    before the first call.
    """

    def __init__(self, step: TrainStep, every: int, *, start: int) -> None:
        self._step, self._every, self._number, self._checked = step, every, start, 0
        leaves = jax.tree_util.tree_leaves_with_path(step.abstract_state)
        self._devices = list(step.mesh.devices.flat)
        self._groups = {path_name(path): _groups(leaf, self._devices) for path, leaf in leaves}
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
        for i, (path, groups) in enumerate(self._groups.items()):
            for group in groups:
                values = {place: tuple(digests[place, i].tolist()) for place in group}
                usual, count = Counter(values.values()).most_common(1)[0]
                if count == len(group):
                    continue
                # Without a majority (two replicas) all are named.
                is_known = 2 * count > len(group)
                devices = [self._devices[place] for place in group if values[place] != usual or not is_known]
                named = _listed(f"{device.id} (process {device.process_index})" for device in devices)
                named = f"device {named} holds" if len(devices) == 1 else f"devices {named} hold"
                since = f"they were equal after step {self._checked}" if self._checked else "since when is not known"
                raise CorruptionError(
                    f"after step {self._number} the copies of {path} differ: {named} "
                    f"{'other bits than the rest' if is_known else 'different bits'}, which is silent corruption; "
                    f"{since}: delete the checkpoints that may hold it, and run again without that device"
                )


def _digest_program(specs: Sequence[PartitionSpec], on_host: Any, mesh: Mesh) -> Callable[[TrainState], jax.Array]:
    """A program that gives digests of what each device holds of each array: uint32 [devices, arrays, 2]."""

    def on_device(*shards: jax.Array) -> jax.Array:
        return jax.lax.all_gather(jnp.stack([jnp.stack(shard_sums(shard)) for shard in shards]), mesh.axis_names)

    # What is replicated is read by each device from its own memory: inside `shard_map` nothing else is known of it.
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=tuple(specs), out_specs=PartitionSpec(), check_vma=False)

    def near(leaf: jax.Array, is_far: bool) -> jax.Array:
        leaf = jax.device_put(leaf, jax.memory.Space.Device) if is_far else leaf
        return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return jax.jit(lambda state: mapped(*map(near, jax.tree.leaves(state), jax.tree.leaves(on_host))))


def _groups(leaf: jax.ShapeDtypeStruct, devices: Sequence[Any]) -> list[list[int]]:
    """Positions of the devices that hold the same part of an array."""
    assert leaf.sharding is not None
    parts, groups = leaf.sharding.devices_indices_map(leaf.shape), {}
    for position, device in enumerate(devices):
        groups.setdefault(str(parts[device]), []).append(position)
    return list(groups.values())
