"""What Google Kubernetes Engine calls TPU slices, and how many hosts each has. No jax here.

Sources, read 2026-11-23: the table of google's xpk (AI-Hypercomputer/xpk, src/xpk/core/system_characteristics.py:
labels, topologies, 4 chips per machine) and the node pools of tensorflow/tpu (tools/kubernetes/terraform: 8x8 of v5e is
16 nodes). From Google's pages as remembered: 8 chips of v5e or v6e may also be one machine (ct5lp-hightpu-8t,
ct6e-standard-8t), and a chip of Ironwood is two devices.
"""

import math
import re
from dataclasses import dataclass

from jaxtrain.errors import ConfigError

# Type -> value of the node label `cloud.google.com/gke-tpu-accelerator`, numbers in a topology, devices per chip.
KINDS = {
    "v4": ("tpu-v4-podslice", 3, 1),
    "v5e": ("tpu-v5-lite-podslice", 2, 1),
    "v5p": ("tpu-v5p-slice", 3, 1),
    "v6e": ("tpu-v6e-slice", 2, 1),
    "v7x": ("tpu7x", 3, 2),
}
_CHIPS_PER_HOST = 4


@dataclass(frozen=True)
class TpuSlice:
    """A TPU slice, divided over its hosts.

    Attributes:
        accelerator: value of the node label `cloud.google.com/gke-tpu-accelerator`.
        topology: value of the node label `cloud.google.com/gke-tpu-topology`.
        hosts: number of machines, each of which runs one process.
        chips_per_host: what each pod asks for as `google.com/tpu`.
        num_devices: devices that jax sees in all processes together.
    """

    accelerator: str
    topology: str
    hosts: int
    chips_per_host: int
    num_devices: int


def tpu_slice(text: str, *, hosts: int | None = None) -> TpuSlice:
    """Read TYPE/TOPOLOGY, as in "v5e/4x4".

    Args:
        text: type and topology.
        hosts: number of hosts that was asked for; None: that of the topology.

    Raises:
        ConfigError: a type or topology that does not exist, or another number of hosts than the topology has.
    """
    kind, _, topology = text.partition("/")
    label, num_dims, devices_per_chip = KINDS.get(kind, ("", 0, 0))
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", topology) or topology.count("x") + 1 != num_dims:
        raise ConfigError(
            f"--tpu {text}: no such slice; write one of {', '.join(KINDS)} and a topology, as in v5e/4x4 or v5p/4x4x4"
        )
    chips = math.prod(int(side) for side in topology.split("x"))
    # Machines have 4 chips, or 1, or all 8 of a 2x4 of v5e and v6e.
    counts = [math.ceil(chips / _CHIPS_PER_HOST)]
    if topology == "2x4":
        counts.insert(0, 1)
    if hosts is None:
        hosts = counts[0]
    if hosts not in counts or chips % hosts:
        raise ConfigError(
            f"--hosts {hosts}: the {chips} chips of --tpu {text} are {counts[0]} hosts; leave --hosts out"
        )
    return TpuSlice(label, topology, hosts, chips // hosts, chips * devices_per_chip)
