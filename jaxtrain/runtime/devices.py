"""The devices of this machine: which there are, their published peaks, their measured speed, and shares of GPUs.

Nothing here imports jax until a function that needs it is called.

Peaks are dense FLOP/s, for model FLOPs utilization (MFU) and for the planner. There is one row per device as jax counts
devices: a chip of TPU v2, v3 or TPU7x is two devices, any other chip is one. Figures are those of the vendors: dense
(half of NVIDIA's "with sparsity"), at boost clocks, with fp32 accumulation.
"""

import itertools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.errors import ConfigError

_TERA = 1e12
# TFLOP/s by number format.
_H100_SXM = dict(fp32=67.0, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9)
_A100 = dict(fp32=19.5, tf32=156.0, bf16=312.0, fp16=312.0)

# Keys are `device.device_kind`, which for NVIDIA is the product name that nvidia-smi prints.
# A format that the hardware does not have, or that has no published figure, is left out.
_PEAKS: dict[str, dict[str, float]] = {
    # NVIDIA Tesla V100 datasheet (2018): fp32 15.7 (SXM2), 14 (PCIe); tensor 125, 112. No bf16, no tf32.
    **{f"Tesla V100-SXM2-{size}GB": dict(fp32=15.7, fp16=125.0) for size in (16, 32)},
    **{f"Tesla V100-PCIE-{size}GB": dict(fp32=14.0, fp16=112.0) for size in (16, 32)},
    # NVIDIA T4 datasheet (2018): fp32 8.1, mixed precision 65. No bf16, no tf32.
    "Tesla T4": dict(fp32=8.1, fp16=65.0),
    # NVIDIA A100 datasheet (2021); the figures are the same for every form and memory size.
    **{f"NVIDIA A100{form}": _A100 for form in ("-SXM4-40GB", "-SXM4-80GB", "-PCIE-40GB", " 80GB PCIe")},
    # NVIDIA A10 datasheet (2021).
    "NVIDIA A10": dict(fp32=31.2, tf32=62.5, bf16=125.0, fp16=125.0),
    # NVIDIA A10G datasheet (published by AWS for g5 instances).
    "NVIDIA A10G": dict(fp32=35.0, tf32=35.0, bf16=70.0, fp16=70.0),
    # NVIDIA L4 datasheet (2023): 120 and 242 with sparsity.
    "NVIDIA L4": dict(fp32=30.3, tf32=60.0, bf16=121.0, fp16=121.0, fp8=242.5),
    # NVIDIA L40S datasheet (2023).
    "NVIDIA L40S": dict(fp32=91.6, tf32=183.0, bf16=362.05, fp16=362.05, fp8=733.0),
    # NVIDIA H100 datasheet (2023) and Hopper architecture whitepaper, table 2 (989.4 and 494.7 dense).
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    # NVIDIA H100 datasheet (2023), PCIe column: tf32 756 and bf16 1513 with sparsity; fp32 51.
    "NVIDIA H100 PCIe": dict(fp32=51.0, tf32=378.0, bf16=756.5, fp16=756.5, fp8=1513.0),
    # NVIDIA H100 datasheet (2024), NVL column: fp32 60, tf32 835 and bf16 1671 with sparsity.
    "NVIDIA H100 NVL": dict(fp32=60.0, tf32=417.5, bf16=835.5, fp16=835.5, fp8=1670.5),
    # NVIDIA H200 datasheet (2024), SXM column, and GH200 datasheet (2023): the compute of the H100 SXM.
    "NVIDIA H200": _H100_SXM,
    "NVIDIA GH200 480GB": _H100_SXM,
    # NVIDIA GB200 NVL72 and HGX B200 specification tables (2025), one GPU: 4.5 and 5 PFLOP/s with sparsity.
    "NVIDIA B200": dict(fp32=75.0, tf32=1100.0, bf16=2250.0, fp16=2250.0, fp8=4500.0),
    "NVIDIA GB200": dict(fp32=80.0, tf32=1250.0, bf16=2500.0, fp16=2500.0, fp8=5000.0),
    # NVIDIA Ada architecture whitepaper (2022), appendix A: tensor figures with fp32 accumulation.
    "NVIDIA GeForce RTX 4090": dict(fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3),
    # NVIDIA Ampere GA102 architecture whitepaper (2021), appendix A: tensor figures with fp32 accumulation.
    "NVIDIA GeForce RTX 3090": dict(fp32=35.6, tf32=35.6, bf16=71.0, fp16=71.0),
    # Google Cloud TPU documentation, system architecture: 180 TFLOP/s per v2 board of 4 chips, 123 per v3 chip; each
    # chip is two devices. TPUs multiply in bf16; fp32 is emulated by several passes and has no published peak.
    "TPU v2": dict(bf16=22.5),
    "TPU v3": dict(bf16=61.5),
    # Same source: 275 per chip, which is one device.
    "TPU v4": dict(bf16=275.0),
    # Same source: v5e 197.
    **{key: dict(bf16=197.0) for key in ("TPU v5 lite", "TPU v5e")},
    # Same source: v5p 459.
    **{key: dict(bf16=459.0) for key in ("TPU v5", "TPU v5p")},
    # Same source: v6e (Trillium) 918.
    **{key: dict(bf16=918.0) for key in ("TPU v6 lite", "TPU v6e")},
    # Same source: TPU7x (Ironwood) 2307 per chip; each of its two chiplets is a device.
    "TPU7x": dict(bf16=1153.5),
}

# Precision policy -> number format of its matmuls; fp8 is the format of linear layers, which are most of the FLOPs.
FORMATS = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "bf16_pure": "bf16", "fp16": "fp16", "fp8": "fp8"}


def device_peaks(device_kind: str) -> dict[str, float]:
    """The dense peaks of one device by number format, in FLOP/s; empty where the device is not known."""
    return {number_format: tera * _TERA for number_format, tera in _PEAKS.get(device_kind, {}).items()}


def peak_flops(device_kind: str, policy: str) -> float | None:
    """The dense peak of a kind of device under a precision policy, in FLOP/s; None where it is not known (a CPU).

    Under fp8 all FLOPs are compared with the fp8 peak, as in published figures, though attention and the output layer
    run in bf16. On a device without fp8 units the policy runs in bf16, so the bf16 peak is returned.
    """
    peaks = device_peaks(device_kind)
    peak = peaks.get(FORMATS.get(policy, ""))
    return peaks.get("bf16") if peak is None and policy == "fp8" else peak


def usable_cores() -> int:
    """The number of cores that this process may use, which in a cluster may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    """One line for the banner: kind and count of the devices, and the number of processes."""
    import jax

    devices = jax.devices()
    kind = devices[0].device_kind
    text = f"{len(devices)} x {kind}" if kind.lower() != devices[0].platform else f"{len(devices)} x {kind.upper()}"
    return f"{text} over {jax.process_count()} processes" if jax.process_count() > 1 else text


def unused_accelerator(platform: str) -> str | None:
    """The line that mends a machine whose NVIDIA card jax does not see; None where there is nothing to mend."""
    if platform == "cpu" and os.environ.get("JAX_PLATFORMS", "") != "cpu" and has_nvidia_driver():
        return "there is an NVIDIA card, but jax runs on the CPU: pip install '.[cuda12]' (or cuda13)"
    return None


# The driver lists every card of the machine; a container gets the files of its own cards only.
_DEVICES, _DRIVER = Path("/dev"), Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> list[str] | None:
    """The GPUs that a process started here would see; None where the environment says which ones jax uses, or none."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if os.environ.get("JAX_LOCAL_DEVICE_IDS") or (platforms and not re.search("cuda|gpu", platforms)):
        return None
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = [name.strip() for name in listed.split(",")]
        # CUDA reads a list up to the first entry that names no device, such as -1 or Slurm's NoDevFiles.
        return list(itertools.takewhile(re.compile(r"\d+$|GPU-|MIG-").match, names))
    if not _DRIVER.is_dir():
        return []
    files = [path for path in _DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    # CUDA numbers what it can open from 0; before the first use of a card its file may not be there.
    return [str(index) for index in range(len(files) or len(list(_DRIVER.iterdir())))]


def gpu_shares(gpus: list[str], num_processes: int) -> list[dict[str, str]]:
    """The environment (CUDA_VISIBLE_DEVICES) that gives each process an equal share of the GPUs, in their order."""
    if not gpus:
        return [{} for _ in range(num_processes)]
    share, left = divmod(len(gpus), num_processes)
    if not share or left:
        works = " or ".join(str(count) for count in range(1, len(gpus) + 1) if len(gpus) % count == 0)
        raise ConfigError(
            f"--processes {num_processes}: {len(gpus)} GPU{'s' * (len(gpus) > 1)} of this machine cannot be shared out "
            f"equally; use --processes {works}, or --emulate N for emulated CPU devices"
        )
    parts = [gpus[index * share : (index + 1) * share] for index in range(num_processes)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


# Side of the matrices: large enough that a product takes longer than its dispatch, which takes about 0.1 ms.
_SIZES = {"cpu": 768, "gpu": 8192, "tpu": 8192}
_REPEATS, _BUDGET_SECONDS = 5, 1.0


def matmul_flops_per_second(dtype: str, *, device: Any = None) -> float:
    """Measure the rate of a square matrix product in FLOP/s, at full precision (no TF32, no bf16 passes of float32).

    `dtype` is "float32" or "bfloat16", `device` a `jax.Device`; None: the first of this process.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    device = device or jax.local_devices()[0]
    size = _SIZES.get(device.platform, 2048)
    # Not zeros or ones: accelerators draw less power on those and clock higher.
    values = np.random.default_rng(0).standard_normal((size, size), np.float32)
    matrix = jax.device_put(jnp.asarray(values, dtype), device)
    multiply = jax.jit(lambda a: jnp.matmul(a, a, precision=jax.lax.Precision.HIGHEST))
    return 2 * size**3 / _median_seconds(lambda: multiply(matrix).block_until_ready())


def memory_bytes_per_second(*, device: Any = None) -> float:
    """Measure the bytes per second of reading 256 MiB of device memory and writing them back."""
    import jax
    import numpy as np

    values = [jax.device_put(np.ones(2**26, np.float32), device or jax.local_devices()[0])]
    # In place, because with a new buffer the time to allocate pages would be measured too.
    scale = jax.jit(lambda x: x * np.float32(1.0000001), donate_argnums=0)
    return 2 * 4 * 2**26 / _median_seconds(lambda: values.append(scale(values.pop()).block_until_ready()))


def _median_seconds(run: Callable[[], object]) -> float:
    run()  # compiles
    seconds: list[float] = []
    while len(seconds) < _REPEATS and sum(seconds) < _BUDGET_SECONDS:
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[len(seconds) // 2]


def sums_over_devices() -> bool:
    """Whether the sum of 1, 2, ..., n over all n devices is correct on every device of this process."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("all")
    numbers = np.arange(1, len(devices) + 1, dtype=np.float32)
    array = jax.make_array_from_callback(numbers.shape, NamedSharding(mesh, spec), lambda index: numbers[index])
    sums = jax.shard_map(lambda x: jax.lax.psum(x, "all") + 0 * x, mesh=mesh, in_specs=spec, out_specs=spec)
    return all(float(shard.data[0]) == numbers.sum() for shard in jax.jit(sums)(array).addressable_shards)
