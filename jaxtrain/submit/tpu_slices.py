"""What Google Kubernetes Engine calls TPU slices, and how many hosts each has. No jax here.

Sources, read 2026-11-23: the table of google's xpk (AI-Hypercomputer/xpk, src/xpk/core/system_characteristics.py:
labels, topologies, 4 chips per machine) and the node pools of tensorflow/tpu (tools/kubernetes/terraform: 8x8 of v5e is
16 nodes). From Google's pages as remembered: 8 chips of v5e or v6e may also be one machine (ct5lp-hightpu-8t,
ct6e-standard-8t), and a chip of Ironwood is two devices.
"""

import math
import re
from dataclasses import dataclass

from jaxtrain.config.arguments import refusal
from jaxtrain.errors import ConfigError

_WRITE = "--tpu v5e/4x4"


@dataclass(frozen=True)
class _Kind:
    """One generation of TPUs.

    Attributes:
        label: value of the node label `cloud.google.com/gke-tpu-accelerator`.
        num_dims: numbers in a topology.
        most_chips: chips of the largest slice.
        devices_per_chip: devices that jax sees per chip.
        single_host: topologies that fit one machine, with its number of chips; all others have 4 chips per machine.
    """

    label: str
    num_dims: int
    most_chips: int
    devices_per_chip: int
    single_host: dict[str, int]


# v5e and v6e have machines of 1, 4 and 8 chips; 8 chips are one machine or two of 4.
KINDS = {
    "v4": _Kind("tpu-v4-podslice", 3, 4096, 1, {"2x2x1": 4}),
    "v5e": _Kind("tpu-v5-lite-podslice", 2, 256, 1, {"1x1": 1, "2x2": 4, "2x4": 8}),
    "v5p": _Kind("tpu-v5p-slice", 3, 8960, 1, {"2x2x1": 4}),
    "v6e": _Kind("tpu-v6e-slice", 2, 256, 1, {"1x1": 1, "2x2": 4, "2x4": 8}),
    # Each chip of Ironwood is two devices.
    "v7x": _Kind("tpu7x", 3, 9216, 2, {"1x1x1": 1, "2x2x1": 4}),
}
# The topologies of two dimensions; those of three are blocks whose sides are listed by rule below.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4")
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
    kind_name, slash, topology = text.partition("/")
    if not slash or kind_name not in KINDS:
        raise ConfigError(refusal("--tpu", f"TYPE/TOPOLOGY with a type of {', '.join(KINDS)}", text, _WRITE))
    kind = KINDS[kind_name]
    chips = _chips(kind_name, topology)
    if hosts is None:
        hosts = 1 if topology in kind.single_host else chips // _CHIPS_PER_HOST
    if hosts not in _host_counts(kind, topology, chips):
        counts = _host_counts(kind, topology, chips)
        shown = " or ".join(
            f"{count} host{'s' if count > 1 else ''} of {_chip_count(chips // count)}" for count in counts
        )
        raise ConfigError(
            f"--hosts {hosts} does not fit --tpu {text}: {_chip_count(chips)} are {shown}; write --hosts {counts[0]}, "
            "or leave --hosts out"
        )
    return TpuSlice(kind.label, topology, hosts, chips // hosts, chips * kind.devices_per_chip)


def _chip_count(chips: int) -> str:
    return f"{chips} chip{'s' if chips > 1 else ''}"


def _host_counts(kind: _Kind, topology: str, chips: int) -> list[int]:
    """The numbers of hosts that a topology comes in, the usual one first."""
    if topology not in kind.single_host:
        return [chips // _CHIPS_PER_HOST]
    return [1] if chips <= _CHIPS_PER_HOST else [1, chips // _CHIPS_PER_HOST]


def _chips(kind_name: str, topology: str) -> int:
    """The number of chips of a topology.

    Raises:
        ConfigError: there is no such topology.
    """
    kind = KINDS[kind_name]
    if not re.fullmatch(r"[1-9]\d{0,2}(x[1-9]\d{0,2}){1,2}", topology):
        raise ConfigError(refusal("--tpu", "a topology such as 4x4 or 4x4x4 after the slash", topology, _WRITE))
    sides = [int(side) for side in topology.split("x")]
    chips = math.prod(sides)
    if kind.num_dims == 2:
        known = topology in _FLAT
        some = ", ".join(_FLAT)
    else:
        # Larger slices are made of cubes of 4x4x4, with the sides in ascending order.
        cubes = sides == sorted(sides) and all(side % 4 == 0 for side in sides)
        known = len(sides) == 3 and (topology in _SMALL or cubes) and chips <= kind.most_chips
        known = known and (topology != "1x1x1" or topology in kind.single_host)
        some = "2x2x1, 2x2x2, 2x2x4, 2x4x4, and multiples of 4x4x4 with ascending sides, such as 4x4x8"
    if not known:
        raise ConfigError(f"--tpu {kind_name}/{topology}: TPU {kind_name} has no such topology; it has {some}")
    return chips
