"""The hardware that a plan can be made for: the catalogue, what `--on h100x8,v5e-16` asks for, and the list of it all.

The figures, each with its source, are data: hardware.yaml beside this file. Nothing here imports jax, so that a list
and a wrong name are answered at once.
"""

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jaxtrain.errors import ConfigError
from jaxtrain.plan.catalogue.hardware_file import read_entries
from jaxtrain.plan.compilers.topology import GPU_TYPES
from jaxtrain.runtime.devices import device_peaks

_ALIASES = {
    "a100": "a100-80",
    "ironwood": "v7x",
    "tpu7x": "v7x",
    "trillium": "v6e",
    "v100": "v100-16",
    "3090": "rtx3090",
    "4070ti": "rtx4070ti",
    "4090": "rtx4090",
    "v5litepod": "v5e",
}
# Chips of a slice: its shape in the names that libtpu takes. Those with a 3D torus have no shape of one chip.
_SLICES_2D = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_SLICES_3D = {
    **{4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"},
    **{1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16", 6144: "16x16x24"},
}
_SLICES = {"v5e": _SLICES_2D, "v6e": _SLICES_2D, "v5p": _SLICES_3D, "tpu7x": _SLICES_3D}
_DEVICES_PER_CHIP = {"tpu7x": 2}

_WRITE = "write NAME, NAMExN or NAME-N, as in h100x8,v5e-16,rtx4090"


@dataclass(frozen=True)
class Hardware:
    """One kind of device, a device being what jax counts as one: figures of a TPU v3 or TPU7x chip are halved.

    The figures of the catalogue's `cpu` are None until `measured_cpu` gives them.

    Attributes:
        name: as in `h100`.
        title: as in "NVIDIA H100 SXM 80 GB".
        kind: `gpu`, `tpu` or `cpu`.
        vendor: `nvidia`, `amd` or `google`; None: another.
        memory_bytes: what allocators can see, where that is known.
        memory_bandwidth: bytes/s.
        peak_flops: dense FLOP/s (int8: OP/s) by number format (`hardware_file.FORMATS`); one that it lacks is left out.
        matmul_efficiency: share of that peak which matmuls in bf16 reach in whole steps; None: that of its kind.
        island: devices joined by the fast link: of a node, or of the largest TPU slice.
        devices_per_host: devices of one machine, each of which writes its part of a checkpoint.
        link_bandwidth: bytes/s of one device in one direction, over all its NVLink, ICI or PCIe links together.
        network_bandwidth: bytes/s of one device between nodes or slices, when all devices of a node send.
        host_bandwidth: bytes/s of one device in one direction between it and its host.
        board_watts: None where it is not published.
        on_demand_usd_hour: of one device.
        spot_usd_hour: of one device.
        purchase_usd: of one device, where one can buy it.
        shapes: device counts that it is rented in.
        compiler: the type that `plan.topology` compiles for, if it does.
        device_kinds: `device.device_kind` in jax.
        sources: figure -> where it is from and when, of every figure that is not None.
    """

    name: str
    title: str
    kind: str
    vendor: str | None
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: dict[str, float]
    matmul_efficiency: float | None
    island: int
    devices_per_host: int
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    board_watts: float | None
    on_demand_usd_hour: float | None
    spot_usd_hour: float | None
    purchase_usd: float | None
    shapes: tuple[int, ...]
    compiler: str | None
    device_kinds: tuple[str, ...]
    sources: dict[str, str]


@dataclass(frozen=True)
class Target:
    """Some devices of one kind, and the islands (nodes, TPU slices) that they take.

    Counts are of devices as jax counts them: `v5p-8` is 8 chips, where Google's own names for v4 and v5p count cores,
    two a chip, and `v7x-8` is 4 chips of two devices.
    """

    hardware: Hardware
    num_devices: int
    num_hosts: int

    @property
    def name(self) -> str:
        """What `parse_targets` reads as this target: `h100x8`, `v5e-16`, `rtx4090`."""
        return _target_name(self.hardware, self.num_devices)

    @property
    def topology(self) -> str | None:
        """The name that `topology_devices` takes, with `num_slices=num_hosts` for TPUs; None without a compiler."""
        compiler = self.hardware.compiler
        if compiler is None:
            return None
        per_host = min(self.num_devices, self.hardware.island)
        if compiler in GPU_TYPES:
            return f"{compiler}:{self.num_hosts}x{per_host}"
        shape = _SLICES[compiler].get(per_host // _DEVICES_PER_CHIP.get(compiler, 1))
        return None if shape is None else f"{compiler}:{shape}"


def catalogue(path: str | Path | None = None) -> dict[str, Hardware]:
    """The hardware by name.

    Args:
        path: a file of the user's with the keys of hardware.yaml, laid over it: it may hold some entries of it with
            some of their keys, and entries of its own with all of them. What it sets has it as the source, unless it
            names another.

    Raises:
        ConfigError: an unknown key or a value that cannot be, in one line that names the file and the entry.
    """
    entries = dict(_shipped_entries())
    if path is not None:
        below = {name: dataclasses.asdict(entry) for name, entry in entries.items()}
        entries |= {
            name: Hardware(**{**values, "name": name}) for name, values in read_entries(Path(path), below).items()
        }
    return entries


def find(name: str, hardware: Mapping[str, Hardware] | None = None) -> Hardware:
    """The entry of a name or an alias (`a100`, `trillium`).

    Raises:
        ConfigError: an unknown name; says the nearest ones, and how one is added.
    """
    known = catalogue() if hardware is None else hardware
    asked = name.strip().lower()
    if asked in known or _ALIASES.get(asked) in known:
        return known[asked if asked in known else _ALIASES[asked]]
    close = difflib.get_close_matches(asked, [*known, *(a for a in _ALIASES if _ALIASES[a] in known)], 3, 0.6)
    nearest = f"did you mean {' or '.join(close)}? Else" if close else "it has no Macs and no cards of laptops;"
    raise ConfigError(f"no {name!r} in the catalogue: {nearest} add a row with --hardware FILE (docs/planner.md)")


def hardware_of(device_kind: str) -> Hardware | None:
    """The entry of a device that jax names so, or None."""
    return next((entry for entry in _shipped_entries().values() if device_kind in entry.device_kinds), None)


def target_of(hardware: Hardware, num_devices: int) -> Target:
    """So many devices of some hardware, or the next larger count that there is: whole nodes, or a slice.

    Raises:
        ConfigError: fewer than one.
    """
    island = hardware.island
    if num_devices < 1:
        raise ConfigError(f"{num_devices} devices of {hardware.name}: ask for 1 or more")
    if hardware.kind == "cpu":
        # A machine has as many CPU devices as one asks jax for.
        return Target(hardware, num_devices, 1)
    nodes = math.ceil(num_devices / island)
    if hardware.kind == "tpu":
        num_devices = min(count for count in (*hardware.shapes, nodes * island) if count >= num_devices)
    elif num_devices > island:
        num_devices = nodes * island
    return Target(hardware, num_devices, nodes)


def rented_devices(target: Target) -> int:
    """Devices that are rented for a target: whole nodes, slices or hosts, or the next count of `Hardware.shapes`."""
    hardware, count = target.hardware, target.num_devices
    if count % hardware.island == 0:
        return count
    counts = [shape for shape in hardware.shapes if shape >= count]
    # Several hosts of a larger node are rented where one of them is.
    host = hardware.devices_per_host
    if host in hardware.shapes:
        counts.append(math.ceil(count / host) * host)
    return min(counts, default=count)


def parse_targets(
    text: str, hardware: Mapping[str, Hardware] | None = None, *, told: Callable[[str], None] = lambda line: None
) -> list[Target]:
    """What `--on` asks for.

    Args:
        text: separated by commas: `NAME` (one device), `NAMExN`, `NAME-N` or `NAME:N` (N devices), `MxNAME` and
            `MxNAMExN` (M times as many). A name may have its maker and its memory too: `NVIDIA-H100-80GB`.
        hardware: the catalogue; default: the shipped one.
        told: receives a line where there is no such count, and the next larger one is taken.

    Raises:
        ConfigError: an unknown name.
    """
    known = catalogue() if hardware is None else hardware
    items = [item for item in "".join(text.lower().split()).split(",") if item]
    if not items:
        raise ConfigError(f"no hardware in {text!r}; {_WRITE}")
    targets = []
    for item in items:
        entry, count = _parse_target(item, known)
        targets.append(target_of(entry, count))
        if targets[-1].num_devices != count:
            told(f"there is no {_target_name(entry, count)}; the next larger is {targets[-1].name}")
    return targets


def with_network(target: Target, network: str) -> Target:
    """The target with another network between its nodes or slices.

    Args:
        target: hardware and count.
        network: of one device in one direction: `400Gb` (bits/s) or `50GB` (bytes/s), in G, M or T.

    Raises:
        ConfigError: a rate that cannot be read.
    """
    read = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MGT])([bB])(?:it)?(?:/s|ps)?", network.strip())
    if read is None or not float(read[1]):
        raise ConfigError(f"--network {network!r}: write bits/s or bytes/s of one device, as in 400Gb or 50GB")
    rate = float(read[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[read[2]] / (8 if read[3] == "b" else 1)
    hardware = target.hardware
    sources = hardware.sources | {"network_bandwidth": "--network"}
    return dataclasses.replace(target, hardware=dataclasses.replace(hardware, network_bandwidth=rate, sources=sources))


def measured_cpu(
    peak_flops: dict[str, float], memory_bandwidth: float, memory_bytes: int, num_devices: int
) -> Hardware:
    """The entry `cpu` with what was measured on this machine.

    Args:
        peak_flops: FLOP/s by number format of one device while the others work too.
        memory_bandwidth: bytes/s of one device while the others work too.
        memory_bytes: of one device.
        num_devices: devices that jax makes of the machine.
    """
    measured = "measured on this machine"
    moved = f"{measured}: data between the devices of a CPU moves through its memory"
    sources = {key: measured for key in ("memory_bytes", "memory_bandwidth", "peak_flops")}
    sources |= {"link_bandwidth": moved, "network_bandwidth": moved, "host_bandwidth": moved}
    sources["board_watts"] = "assumed: 65 W a machine, the base power of common desktop processors (Intel ARK, 2024)"
    shipped = catalogue()["cpu"]
    return dataclasses.replace(
        shipped,
        peak_flops=dict(peak_flops),
        memory_bandwidth=memory_bandwidth,
        memory_bytes=memory_bytes,
        link_bandwidth=memory_bandwidth,
        network_bandwidth=memory_bandwidth,
        host_bandwidth=memory_bandwidth,
        island=num_devices,
        devices_per_host=num_devices,
        shapes=(num_devices,),
        board_watts=65.0 / num_devices,
        sources=shipped.sources | sources,
    )


def _target_name(hardware: Hardware, num_devices: int) -> str:
    if hardware.kind == "tpu":
        return f"{hardware.name}-{num_devices}"
    return hardware.name if num_devices == 1 else f"{hardware.name}x{num_devices}"


def _parse_target(item: str, known: Mapping[str, Hardware]) -> tuple[Hardware, int]:
    times, rest = 1, re.sub(r"^(nvidia|geforce|tesla|amd|google|tpu)-?", "", item)
    named = _split_count(rest, known)
    several = re.fullmatch(r"(\d+)x(.+)", rest)
    if named is None and several is not None:
        times, rest = int(several[1]), several[2]
        named = _split_count(rest, known)
    if named is None:
        find(re.sub(r"(?<!rt)([x:-]\d+)+$", "", rest), known)
        raise ConfigError(f"cannot read the hardware {item!r}; {_WRITE}")
    hardware, count = named
    if hardware.kind == "tpu" and times > 1 and count > 1 and count % hardware.island:
        raise ConfigError(
            f"{item}: several slices are planned for only when each is the largest, {hardware.name}-{hardware.island}"
        )
    return hardware, times * count


def _split_count(item: str, known: Mapping[str, Hardware]) -> tuple[Hardware, int] | None:
    """Name and count; the longest name first, because `a100-40` is a card and not forty of them."""
    for name in sorted({*known, *_ALIASES}, key=len, reverse=True):
        entry = known.get(name) or known.get(_ALIASES.get(name, ""))
        if entry is None:
            continue
        size = re.search(r"(\d+) GB", entry.title)
        words = rf"(?:-?sxm\d?)?(?:-?(?:{size[1]})?gb)?" if size else ""
        # `mi300x8` are eight of what ends in an x itself.
        between = "[x:-]?" if name.endswith("x") else "[x:-]"
        count = re.fullmatch(rf"{re.escape(name)}{words}(?:{between}(\d+))?", item)
        if count:
            return entry, int(count[1] or 1)
    return None


@functools.cache
def _shipped_entries() -> dict[str, Hardware]:
    with resources.as_file(resources.files("jaxtrain.plan.catalogue") / "hardware.yaml") as path:
        entries = read_entries(path, {}, peaks=device_peaks)
    return {name: Hardware(name=name, **values) for name, values in entries.items()}
