"""The hardware of this machine as a target: its entry of the catalogue, or a CPU measured on the spot."""

import os

from jaxtrain.plan.catalogue.hardware import Hardware, Target, hardware_of, measured_cpu


def measure_cpu(num_devices: int) -> Hardware:
    """The CPU of this machine, measured in about two seconds: its matmul rate and the rate of its memory.

    Args:
        num_devices: devices that the run makes of it; each gets an equal share of cores, memory and rates.
    """
    # The measuring parts are above the planner, and load jax.
    import jax

    from jaxtrain.runtime.devices import matmul_flops_per_second, memory_bytes_per_second

    device = jax.local_devices(backend="cpu")[0]
    fp32 = matmul_flops_per_second("float32", device=device)
    # Every 16-bit format is computed in float32 on CPUs without units for it, and casts cost besides.
    bf16 = min(matmul_flops_per_second("bfloat16", device=device), fp32)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    peaks = {"fp32": fp32, "tf32": fp32, "bf16": bf16, "fp16": bf16}
    return measured_cpu(
        {name: rate / num_devices for name, rate in peaks.items()},
        memory_bytes_per_second(device=device) / num_devices,
        total // num_devices,
        num_devices,
    )


# Of one core: what the layouts of a CPU are compared with where measuring would give every process its own answer.
_NOMINAL_FLOPS, _NOMINAL_BANDWIDTH = 5e10, 5e9


def nominal_cpu(num_devices: int) -> Hardware:
    """A CPU with round figures, the same in every process; its times mean nothing, their order does."""
    peaks: dict[str, float] = dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), _NOMINAL_FLOPS)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return measured_cpu(peaks, _NOMINAL_BANDWIDTH, total // num_devices, num_devices)


def this_machine(num_devices: int | None = None) -> Target | None:
    """The devices that jax has, as a target; None where they are not in the catalogue.

    Args:
        num_devices: of a CPU; None: as many as jax makes of it.
    """
    import jax

    devices = jax.devices()
    if devices[0].platform == "cpu":
        count = num_devices or len(devices)
        alone = jax.process_count() == 1
        return Target(measure_cpu(count) if alone else nominal_cpu(count), count, 1)
    hardware = hardware_of(devices[0].device_kind)
    if hardware is None:
        return None
    return Target(hardware, len(devices), -(-len(devices) // hardware.island))
