"""Energy that a part of a program uses, by the counters of NVIDIA cards (extra `gpu-telemetry`)."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Energy:
    """The energy that all local devices used.

    Attributes:
        joules: None until it was measured, or where it cannot be.
        reason: why it cannot be measured; None where it can.
    """

    joules: float | None = None
    reason: str | None = None


def _handles(devices: list[Any]) -> tuple[list[Any], str | None]:
    """Find NVML's handles of devices, or the reason why there are none."""
    if devices[0].platform != "gpu":
        return [], f"a {devices[0].platform} has no energy counter that NVML reads"
    if importlib.util.find_spec("pynvml") is None:
        return [], "NVML is not installed: pip install 'jaxtrain[gpu-telemetry]'"
    import pynvml  # pyright: ignore[reportMissingImports]  of an extra

    try:
        pynvml.nvmlInit()
        # CUDA's device 0 is the first of the cards that CUDA_VISIBLE_DEVICES names.
        return [pynvml.nvmlDeviceGetHandleByIndex(_number(device.local_hardware_id)) for device in devices], None
    except (pynvml.NVMLError, IndexError, ValueError) as error:
        return [], f"NVML: {error}"


def _number(index: int) -> int:
    """Return the index of the card of a CUDA device."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return int(visible.split(",")[index]) if visible else index


@contextlib.contextmanager
def measured_energy(devices: list[Any]) -> Iterator[Energy]:
    """Measure the energy that devices use inside the context; the caller waits for them at its end."""
    energy = Energy()
    handles, energy.reason = _handles(devices)
    if not handles:
        yield energy
        return
    import pynvml  # pyright: ignore[reportMissingImports]  of an extra

    def total() -> float:
        return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1e3

    try:
        before = total()
    except pynvml.NVMLError as error:  # older than Volta
        energy.reason = f"NVML: {error}"
        yield energy
        return
    yield energy
    energy.joules = total() - before
