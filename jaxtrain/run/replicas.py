"""Digests of a state per device: copies of one array that differ between devices are silent corruption."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.checkpoint.digest import shard_sums
from jaxtrain.errors import CorruptionError
from jaxtrain.layout.sharding import path_name

# Named in a message; the number of the others is given.
_SHOWN = 4


@dataclass(frozen=True)
class Copies:
    """One array of a state and the devices that hold equal parts of it.

    Attributes:
        path: of the array.
        groups: positions in the mesh (in the order of `mesh.devices.flat`) of the devices that hold the same part.
    """

    path: str
    groups: tuple[tuple[int, ...], ...]


class DeviceDigests:
    """Computes, on the devices, a digest of what each of them holds of each array of a state.

    One program for the whole state, compiled at its first use: it reads every array once.

    Args:
        state: shapes with shardings, as `TrainStep.abstract_state`.
        on_host: tree of the same structure; whether an array is kept in the host's memory.
        mesh: of the state.

    Attributes:
        copies: of each array, in the order of the digests.
    """

    def __init__(self, state: Any, on_host: Any, mesh: Mesh) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(state)
        self.devices = list(mesh.devices.flat)
        self.copies = tuple(
            Copies(path_name(path), _groups(leaf.sharding, leaf.shape, self.devices)) for path, leaf in leaves
        )
        specs = tuple(leaf.sharding.spec for _, leaf in leaves)
        is_far = jax.tree.leaves(on_host)
        axes = mesh.axis_names

        def on_device(*shards: jax.Array) -> jax.Array:
            table = jnp.stack([jnp.stack(shard_sums(shard)) for shard in shards])
            return jax.lax.all_gather(table, axes)

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
        found: dict[str, tuple[list[int], bool]] = {}
        for i, one in enumerate(self.copies):
            for group in one.groups:
                places = _differing(digests[:, i], group)
                if places is not None:
                    found.setdefault(one.path, places)
        if not found:
            return
        path, (places, is_known) = next(iter(found.items()))
        more = f" (and those of {len(found) - 1} more arrays)" if len(found) > 1 else ""
        which = f"{self.named(places)} other bits than the rest" if is_known else f"{self.named(places)} different bits"
        since = f"they were equal after step {checked}" if checked else "when that began is not known"
        raise CorruptionError(
            f"after step {number} the copies of {path} differ{more}: {which}, which is silent corruption; {since}: "
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
        if not differ.any():
            return
        arrays = np.flatnonzero(differ.any(axis=0))
        places = np.flatnonzero(differ[:, arrays[0]]).tolist()
        more = f" and {len(arrays) - 1} more arrays" if len(arrays) > 1 else ""
        raise CorruptionError(
            f"step {number} was computed twice from the same state and batch and gave other bits in "
            f"{self.copies[arrays[0]].path}{more}: {self.named(places)} them; that is silent corruption, or operations "
            "that are not deterministic (GPU: compiler_options={xla_gpu_deterministic_ops: true}); run again without "
            "that device"
        )

    def named(self, places: Sequence[int]) -> str:
        """Devices of the mesh as the subject of a sentence: `device 3 (process 0) holds`."""
        shown = [f"{self.devices[i].id} (process {self.devices[i].process_index})" for i in places[:_SHOWN]]
        more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        return f"device {shown[0]} holds" if len(places) == 1 else f"devices {', '.join(shown)}{more} hold"


def _numbers(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _groups(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], devices: Sequence[Any]
) -> tuple[tuple[int, ...], ...]:
    """Positions of the devices that hold the same part of an array."""
    parts = sharding.devices_indices_map(shape)
    groups: dict[str, list[int]] = {}
    for position, device in enumerate(devices):
        groups.setdefault(str(parts[device]), []).append(position)
    return tuple(map(tuple, groups.values()))


def _differing(digests: np.ndarray, group: tuple[int, ...]) -> tuple[list[int], bool] | None:
    """The positions of a group at fault by their digests (uint32 [devices, 2]); None: all are equal.

    Returns:
        Those that differ from more than half of the group, and True; or all, and False, where no digest is that of
        more than half.
    """
    values = [tuple(digests[i].tolist()) for i in group]
    usual, count = Counter(values).most_common(1)[0]
    if count == len(group):
        return None
    is_known = 2 * count > len(group)
    return [i for i, value in zip(group, values, strict=True) if value != usual or not is_known], is_known
