"""How fast a device multiplies and copies, and whether devices add up right: seconds, for `doctor` and `plan`."""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# Side of the matrices: large enough to keep the device busy for longer than a dispatch takes, which is about 0.1 ms.
_SIZES = {"cpu": 768, "gpu": 8192, "tpu": 8192}
_REPEATS = 5
_BUDGET_SECONDS = 1.0


def matmul_flops_per_second(dtype: str, *, device: Any = None) -> float:
    """The measured rate of a square matrix product, two operations per multiply-add.

    float32 is multiplied at full precision (not TF32, not three bf16 passes).

    Args:
        dtype: float32 or bfloat16.
        device: a `jax.Device`; None: the first of this process.

    Returns:
        Median of five, fewer where a product takes more than a fifth of a second.
    """
    device = jax.local_devices()[0] if device is None else device
    size = _SIZES.get(device.platform, 2048)
    generator = np.random.default_rng(0)
    # Not zeros or ones: accelerators draw less power on those and clock higher.
    values = generator.standard_normal((size, size), np.float32)
    matrix = jax.device_put(jnp.asarray(values, dtype), device)
    multiply = jax.jit(lambda a: jnp.matmul(a, a, precision=jax.lax.Precision.HIGHEST))
    multiply(matrix).block_until_ready()
    seconds: list[float] = []
    while len(seconds) < _REPEATS and sum(seconds) < _BUDGET_SECONDS:
        started = time.perf_counter()
        multiply(matrix).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(seconds)


def memory_bytes_per_second(*, device: Any = None) -> float:
    """The measured rate of reading 256 MiB and writing them back, bytes of both counted.

    Args:
        device: a `jax.Device`; None: the first of this process.

    Returns:
        Median of five.
    """
    device = jax.local_devices()[0] if device is None else device
    size = 2**26
    values = jax.device_put(np.ones(size, np.float32), device)
    # In place: a new buffer would measure how fast the system hands out pages.
    scale = jax.jit(lambda x: x * np.float32(1.0000001), donate_argnums=0)
    values = scale(values).block_until_ready()
    seconds: list[float] = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        values = scale(values).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return 2 * 4 * size / statistics.median(seconds)


def sums_over_devices() -> bool:
    """Whether a sum over all devices of the run (of 1, 2, ..., n) is right on each of them."""
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("all")
    numbers = np.arange(1, len(devices) + 1, dtype=np.float32)
    array = jax.make_array_from_callback(numbers.shape, NamedSharding(mesh, spec), lambda index: numbers[index])
    total = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "all") + jnp.zeros_like(x), mesh=mesh, in_specs=spec, out_specs=spec)
    )(array)
    return all(float(shard.data[0]) == numbers.sum() for shard in total.addressable_shards)
