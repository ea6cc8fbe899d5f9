"""What offloading to the host's memory takes and saves: bytes there, bytes on the way, time over PCIe. No jax here."""

from collections.abc import Sequence

from jaxtrain.config.schema import Config
from jaxtrain.optim import update_slices
from jaxtrain.optim.rules import updates_elementwise
from jaxtrain.optim.update_slices import num_slices
from jaxtrain.plan.catalogue.hardware import Hardware
from jaxtrain.plan.work.state import Parameter, StateBytes, local_size

# Bytes/s of one device in one direction between it and its host, at most: PCIe 3.0, 4.0 and 5.0 x16 have 16, 32 and
# 64 GB/s (NVIDIA's data sheets of the cards); TPUs have about 16 GB/s a chip, v6e 32 (scaling-book, "How to think
# about TPUs", 2025; of v7x nothing is published: as v6e).
_HOST_BANDWIDTH = {"gpu": 32e9, "tpu": 16e9}
_OTHERS = {
    **dict.fromkeys(("t4", "p100", "v100-16", "v100-32"), 16e9),
    **dict.fromkeys(("h100", "h200", "b200", "b300"), 64e9),
    **dict.fromkeys(("v6e", "v7x"), 32e9),
}


def host_bandwidth(hardware: Hardware) -> float:
    """Bytes/s of one device in one direction to or from its host; on a CPU device and host memory are one."""
    if hardware.kind == "cpu":
        return hardware.memory_bandwidth
    return _OTHERS.get(hardware.name, _HOST_BANDWIDTH[hardware.kind])


def state_on_its_way(config: Config, placed: Sequence[Parameter], state: StateBytes, degrees: dict[str, int]) -> int:
    """Bytes of an offloaded optimizer state that are on one device at once: as they came, and as they go back."""
    trained = [one for one in placed if one.trained]
    if not updates_elementwise(config.optimizer):
        return 2 * state.optimizer
    small = largest = total = 0
    for one in trained:
        size = 4 * local_size(one.shape, one.state_entries, degrees)
        total += size
        shape = tuple(
            local_size((dim,), (entry,), degrees) for dim, entry in zip(one.shape, one.state_entries, strict=True)
        )
        cut = size // num_slices(shape)
        small += size if size <= update_slices.SLICE_BYTES else 0
        largest = max(largest, cut)
    moments = state.optimizer / max(total, 1)
    return round(2 * moments * max(largest, min(small, update_slices.SLICE_BYTES)))
