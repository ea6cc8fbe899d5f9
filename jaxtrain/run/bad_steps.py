"""Numbers that go wrong: spikes, steps that are not finite, and copies of an array that differ between devices."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.checkpoint.digest import shard_sums
from jaxtrain.config.schema import SpikesConfig
from jaxtrain.errors import CorruptionError
from jaxtrain.metrics.progress import Progress
from jaxtrain.models.task import Batch
from jaxtrain.run.saving import is_due
from jaxtrain.runtime.tree import path_name
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep
from jaxtrain.train.update import Metrics

# Lines of one process; after these the counts of skipped steps go on alone.
_MOST_SHOWN = 10
_MOST_DEVICES = 3


class BadSteps:
    """Says which steps were skipped, by their metrics once they are done."""

    def __init__(self, spikes: SpikesConfig | None, progress: Progress) -> None:
        self._spikes, self._progress, self._shown = spikes, progress, 0

    def note(self, number: int, metrics: Mapping[str, jax.Array]) -> None:
        """Look at the metrics of a step that is done."""
        is_spike = self._spikes is not None and bool(metrics["spiked"])
        # A batch without weight is skipped without a fault.
        is_empty = float(metrics["weight"]) == 0 and float(metrics["grad_norm"]) == 0
        if not (is_spike or (int(metrics["skipped_in_a_row"]) and not is_empty)) or self._shown >= _MOST_SHOWN:
            return
        self._shown += 1
        numbers = f"loss {float(metrics['loss']):.4g}, gradient norm {float(metrics['grad_norm']):.4g}"
        what = "is not finite"
        if is_spike and self._spikes is not None:
            what = (
                f"is a spike, more than {self._spikes.sigmas:g} deviations above the last {self._spikes.window} steps"
            )
        self._progress.message(f"step {number} {what}: {numbers}; batch {number - 1} is skipped")


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
        """One step; a CorruptionError names the first array of which devices hold other bits, and the devices."""
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
                shown = [f"{device.id} (process {device.process_index})" for device in devices[:_MOST_DEVICES]]
                shown += [f"{len(devices) - _MOST_DEVICES} more"] if len(devices) > _MOST_DEVICES else []
                named = f"device {shown[0]} holds" if len(devices) == 1 else f"devices {', '.join(shown)} hold"
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
