"""Some devices of one kind of hardware: what `--on h100x8,v5e-16` asks for, and this machine."""

import itertools
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtrain.errors import ConfigError
from jaxtrain.plan.hardware import Hardware, catalogue, find, hardware_of, measured_cpu, nearest
from jaxtrain.plan.topology import GPU_TYPES, CompilerMissingError, check_installed

# Chips of a slice: its shape in the names that libtpu takes. Those with a 3D torus have no shape of one chip.
_SLICES_2D = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_SLICES_3D = {
    **{4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"},
    **{1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16", 6144: "16x16x24"},
}
_SLICES = {"v5e": _SLICES_2D, "v6e": _SLICES_2D, "v5p": _SLICES_3D, "tpu7x": _SLICES_3D}
_DEVICES_PER_CHIP = {"tpu7x": 2}

# What may stand before and after a name. `mi300x8` are eight of what ends in an x itself.
_TIMES = ("()", r"(\d{1,99})\s*x\s*")
_COUNTS = ("()", r"\s*[x:-]\s*(\d{1,99})", r"(?<=x)(\d{1,99})")
_MAX_DEVICES = 999_999
_WRITE = f"write NAME, NAMExN or NAME-N (N at most {_MAX_DEVICES}), as in h100x8,v5e-16,rtx4090"


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
        return _name(self.hardware, self.num_devices)

    @property
    def topology(self) -> str | None:
        """The name that `topology_devices` takes, with `num_slices=num_hosts` for TPUs; None without a compiler."""
        compiler = self.hardware.compiler
        per_host = min(self.num_devices, self.hardware.island)
        if compiler in GPU_TYPES:
            return f"{compiler}:{self.num_hosts}x{per_host}"
        shapes = _SLICES.get(compiler or "", {})
        shape = shapes.get(per_host // _DEVICES_PER_CHIP.get(compiler or "", 1))
        return None if shape is None else f"{compiler}:{shape}"


def check_compiler(target: Target) -> None:
    """Raise a `CompilerMissingError` where nothing here compiles for a target; says what to install, if that is all."""
    if target.topology is not None:
        check_installed(target.topology.partition(":")[0])
    elif target.hardware.kind != "cpu":
        raise CompilerMissingError("no compiler for it that runs without the hardware")


def _name(hardware: Hardware, count: int) -> str:
    if hardware.kind == "tpu":
        return f"{hardware.name}-{count}"
    return hardware.name if count == 1 else f"{hardware.name}x{count}"


def target_of(hardware: Hardware, num_devices: int) -> Target:
    """So many devices (1 or more) of some hardware, or the next larger count that there is: whole nodes, or a slice."""
    island = hardware.island
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
            `MxNAMExN` (M times as many). A name is what `find` reads: `h100`, `NVIDIA H100 80GB HBM3`, `A100 40GB`.
        hardware: the catalogue; default: the shipped one.
        told: receives a line where there is no such count, and the next larger one is taken.

    Raises:
        ConfigError: an unknown name, or a count that cannot be had.
    """
    known = catalogue() if hardware is None else hardware
    targets = []
    for item in text.split(","):
        entry, times, count = _read_item(item.strip().lower(), known)
        # Several slices of a TPU are each the largest there is.
        is_cut = entry.kind == "tpu" and times > 1 and count > 1 and count % entry.island
        if not 0 < times * count <= _MAX_DEVICES or is_cut:
            raise ConfigError(f"cannot read the hardware {item!r}; {_WRITE}")
        targets.append(target_of(entry, times * count))
        if targets[-1].num_devices != times * count:
            told(f"there is no {_name(entry, times * count)}; the next larger is {targets[-1].name}")
    return targets


def _read_item(item: str, hardware: Mapping[str, Hardware]) -> tuple[Hardware, int, int]:
    """Return the entry of one item of `--on`, and the numbers before and after its name (1 where there is none)."""
    for times, count in itertools.product(_TIMES, _COUNTS):
        match = re.fullmatch(f"{times}(.+?){count}", item)
        entry = None if match is None else find(match[2], hardware)
        if match is not None and entry is not None:
            return entry, int(match[1] or 1), int(match[3] or 1)
    close = " or ".join(nearest(re.sub(r"(?<=\d)x\d+$", "", item), hardware))
    meant = f"did you mean {close}? Else" if close else f"{_WRITE}, or"
    raise ConfigError(f"no {item!r} in the catalogue: {meant} add a row with --hardware FILE (docs/planner.md)")


def measure_cpu(num_devices: int) -> Hardware:
    """The CPU of this machine, measured in about two seconds: its matmul rate and the rate of its memory.

    Each of the devices that a run makes of it gets an equal share of cores, memory and rates.
    """
    import jax

    from jaxtrain.runtime.devices import matmul_flops_per_second, memory_bytes_per_second

    device = jax.local_devices(backend="cpu")[0]
    fp32 = matmul_flops_per_second("float32", device=device)
    # Every 16-bit format is computed in float32 on CPUs without units for it, and casts cost besides.
    bf16 = min(matmul_flops_per_second("bfloat16", device=device), fp32)
    return _cpu(
        fp32 / num_devices, bf16 / num_devices, memory_bytes_per_second(device=device) / num_devices, num_devices
    )


def nominal_cpu(num_devices: int) -> Hardware:
    """A CPU with round figures, the same in every process; its times mean nothing, their order does."""
    return _cpu(5e10, 5e10, 5e9, num_devices)


def _cpu(fp32: float, bf16: float, bandwidth: float, num_devices: int) -> Hardware:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_devices
    return measured_cpu({"fp32": fp32, "tf32": fp32, "bf16": bf16, "fp16": bf16}, bandwidth, memory_bytes, num_devices)


def this_machine(num_devices: int | None = None) -> Target | None:
    """The devices that jax has (of a CPU, so many), as a target; None where they are not in the catalogue."""
    import jax

    devices = jax.devices()
    if devices[0].platform == "cpu":
        count = num_devices or len(devices)
        return Target(measure_cpu(count) if jax.process_count() == 1 else nominal_cpu(count), count, 1)
    hardware = hardware_of(devices[0].device_kind)
    return None if hardware is None else Target(hardware, len(devices), -(-len(devices) // hardware.island))
