"""What accelerators this machine has, and what jax makes of them."""

import os
from pathlib import Path


def has_tpu_chips() -> bool:
    """Whether this machine has TPU chips, whatever jax uses; without importing jax."""
    return Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()


def has_nvidia_driver() -> bool:
    """Whether this machine has NVIDIA's driver, whatever jax uses; without importing jax."""
    return Path("/proc/driver/nvidia/version").exists()


def has_accelerator() -> bool:
    """Whether this machine has a GPU or TPU that the environment does not keep jax from; without importing jax."""
    return os.environ.get("JAX_PLATFORMS", "") != "cpu" and (has_nvidia_driver() or has_tpu_chips())


def describe_devices() -> str:
    """One line for the banner: platform, kind and count; names a GPU that jax does not use."""
    import jax

    devices = jax.devices()
    kind = devices[0].device_kind
    text = f"{len(devices)} x {kind}" if kind.lower() != devices[0].platform else f"{len(devices)} x {kind.upper()}"
    if jax.process_count() > 1:
        text += f" over {jax.process_count()} processes"
    return text


def unused_accelerator(platform: str) -> str | None:
    """The line that mends a machine whose NVIDIA card jax does not see; None where there is nothing to mend."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    if platform == "cpu" and asked != "cpu" and has_nvidia_driver():
        return "there is an NVIDIA card, but jax runs on the CPU: pip install 'jaxtrain[cuda12]' (or cuda13)"
    return None
