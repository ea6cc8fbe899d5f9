"""Silent corruption: copies of an array that differ between devices, and steps that give other bits when repeated."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.checkpoint.digest import shard_sums
from jaxtrain.config.schema import ChecksConfig
from jaxtrain.errors import CorruptionError
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.task import Batch
from jaxtrain.run.saving import is_due
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep
from jaxtrain.train.update import Metrics

# Named in a message; the number of the others is given.
_SHOWN = 4


class CheckedStep:
    """A step that is compared with itself, or whose copies are compared, at multiples of some numbers.

    A replay needs memory for a second state during that step: the state is copied, the step runs on the copy, digests
    of the result are kept and the result is dropped; then the step runs on the state itself.

    Args:
        step: compiled.
        checks: when what is compared.
        start: steps done before the first call.
    """

    def __init__(self, step: TrainStep, checks: ChecksConfig, *, start: int) -> None:
        self._step, self._checks, self._number = step, checks, start
        self._digests = DeviceDigests(step.abstract_state, step.state_on_host, step.mesh)
        self._checked = 0

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step.

        Raises:
            CorruptionError: bits differ that must be equal.
        """
        self._number += 1
        first = None
        if is_due(self._number, self._checks.replay_every):
            first = self._digests(self._step(jax.tree.map(jnp.copy, state), batch)[0])
        state, metrics = self._step(state, batch)
        if first is not None:
            self._digests.check_equal(first, self._digests(state), number=self._number)
        if is_due(self._number, self._checks.replicas_every):
            self._digests.check_copies(state, number=self._number, checked=self._checked)
            self._checked = self._number
        return state, metrics


class DeviceDigests:
    """Computes, on the devices, a digest of what each of them holds of each array of a state.

    One program for the whole state, compiled at its first use: it reads every array once.

    Args:
        state: shapes with shardings, as `TrainStep.abstract_state`.
        on_host: tree of the same structure; whether an array is kept in the host's memory.
        mesh: of the state.
    """

    def __init__(self, state: Any, on_host: Any, mesh: Mesh) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(state)
        self._devices = list(mesh.devices.flat)
        self._paths = [path_name(path) for path, _ in leaves]
        self._groups = [_groups(leaf.sharding, leaf.shape, self._devices) for _, leaf in leaves]
        is_far, axes = jax.tree.leaves(on_host), mesh.axis_names

        def on_device(*shards: jax.Array) -> jax.Array:
            return jax.lax.all_gather(jnp.stack([jnp.stack(shard_sums(shard)) for shard in shards]), axes)

        specs = tuple(leaf.sharding.spec for _, leaf in leaves)
        # What is replicated is read by each device from its own memory: inside `shard_map` nothing else is known of it.
        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)

        def digests(state: Any) -> jax.Array:
            arrays = [
                jax.device_put(leaf, jax.memory.Space.Device) if far else leaf
                for leaf, far in zip(jax.tree.leaves(state), is_far, strict=True)
            ]
            return mapped(*map(_numbers, arrays))

        self._program = jax.jit(digests)

    def __call__(self, state: Any) -> np.ndarray:
        """The digests of a state: uint32 [devices, arrays, 2], equal on all processes."""
        # Awaited: with two programs in flight, emulated devices can wait for each other for ever.
        return np.asarray(self._program(jax.block_until_ready(state)).addressable_data(0))

    def check_copies(self, state: Any, *, number: int, checked: int) -> None:
        """Raise where devices hold other bits of the same array.

        Args:
            state: on the mesh.
            number: of the step that it follows.
            checked: step after which the copies were equal the last time; 0: never.

        Raises:
            CorruptionError: names the first such array and the devices.
        """
        digests = self(state)
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
                since = f"they were equal after step {checked}" if checked else "when that began is not known"
                raise CorruptionError(
                    f"after step {number} the copies of {path} differ: {which}, which is silent corruption; {since}: "
                    "delete the checkpoints that may hold it, and run again without that device"
                )

    def check_equal(self, first: np.ndarray, second: np.ndarray, *, number: int) -> None:
        """Raise where two computations of one step gave other bits.

        Args:
            first, second: digests of the state after each.
            number: of the step.

        Raises:
            CorruptionError: names the first array that differs and the devices.
        """
        differ = (first != second).any(axis=-1)
        if differ.any():
            array = int(np.flatnonzero(differ.any(axis=0))[0])
            places = np.flatnonzero(differ[:, array]).tolist()
            raise CorruptionError(
                f"step {number} was computed twice from the same state and batch and gave other bits in "
                f"{self._paths[array]}: {self._named(places)} them; that is silent corruption, or operations that are "
                "not deterministic (GPU: compiler_options={xla_gpu_deterministic_ops: true}); run again without that "
                "device"
            )

    def _named(self, places: Sequence[int]) -> str:
        """Devices of the mesh as the subject of a sentence: `device 3 (process 0) holds`."""
        shown = [f"{self._devices[i].id} (process {self._devices[i].process_index})" for i in places[:_SHOWN]]
        more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        return f"device {shown[0]} holds" if len(places) == 1 else f"devices {', '.join(shown)}{more} hold"


def _numbers(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _groups(sharding: jax.sharding.Sharding, shape: tuple[int, ...], devices: Sequence[Any]) -> list[list[int]]:
    """Positions of the devices that hold the same part of an array."""
    parts = sharding.devices_indices_map(shape)
    groups: dict[str, list[int]] = {}
    for position, device in enumerate(devices):
        groups.setdefault(str(parts[device]), []).append(position)
    return list(groups.values())
