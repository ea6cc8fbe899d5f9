"""Measured limits of a device: matmuls in each number format, memory, and sums over devices."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxtrain.bench.timing import call_seconds
from jaxtrain.runtime.devices import memory_bytes_per_second

# Sides of the matrices, for which a product takes about a millisecond or more.
_SIZES = {"cpu": 768, "gpu": 8192, "tpu": 8192}
_ALL_REDUCE_BYTES = {"cpu": 2**24, "gpu": 2**28, "tpu": 2**28}

# Number format -> dtype of the operands, dtype of the result, precision.
_FORMATS: dict[str, tuple[DTypeLike, DTypeLike, PrecisionLike]] = {
    "fp32": (jnp.float32, jnp.float32, jax.lax.Precision.HIGHEST),
    "tf32": (jnp.float32, jnp.float32, jax.lax.DotAlgorithmPreset.TF32_TF32_F32),
    "bf16": (jnp.bfloat16, jnp.bfloat16, None),
    "fp16": (jnp.float16, jnp.float16, None),
    "fp8": (jnp.float8_e4m3fn, jnp.bfloat16, None),
    "int8": (jnp.int8, jnp.int32, None),
}
# Compute capability from which NVIDIA cards have units for a format.
_SINCE = {"tf32": 8.0, "bf16": 8.0, "fp16": 7.0, "fp8": 8.9, "int8": 7.5}


@dataclass(frozen=True)
class Limits:
    """Measured limits of one device.

    Attributes:
        matmul: number format -> operations per second, where a multiply-add counts as two; None where it was not
            measured.
        memory: bytes per second, read and written.
        all_reduce: bytes per second that a device sends in a sum over all n devices, which is 2 (n - 1) / n of the
            array; None for one device.
        reasons: name of a figure that was not measured -> why.
    """

    matmul: dict[str, float | None]
    memory: float
    all_reduce: float | None
    reasons: dict[str, str]


def measure_limits() -> Limits:
    """Measure the first device of this process, and sums over all devices of the run."""
    device = jax.local_devices()[0]
    matmul: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for name in _FORMATS:
        reason = _lacking(name, device)
        try:
            matmul[name] = None if reason else matmul_rate(name, device)
        except jax.errors.JaxRuntimeError as error:
            matmul[name], reason = None, str(error).splitlines()[0][:200]
        if reason:
            reasons[f"matmul.{name}"] = reason
    if jax.device_count() == 1:
        reasons["all_reduce"] = "one device"
    all_reduce = all_reduce_rate() if jax.device_count() > 1 else None
    return Limits(matmul, memory_bytes_per_second(device=device), all_reduce, reasons)


def _lacking(name: str, device: Any) -> str | None:
    """Return why a device has no units for a number format; None where it has them."""
    match device.platform:
        case "cpu":
            # A step may run in bf16 or fp32; the other formats would be emulated.
            return None if name in ("fp32", "bf16") else "no units for it on a CPU"
        case "gpu":
            capability = getattr(device, "compute_capability", None)
            if capability is not None and float(capability) < _SINCE.get(name, 0.0):
                return f"compute capability {capability}; {name} takes {_SINCE[name]}"
            return None
        case _:
            return "no units for it on a TPU" if name in ("tf32", "fp16", "fp8") else None


def matmul_rate(name: str, device: Any) -> float:
    """Measure a square product in a number format on one device.

    Args:
        name: number format, such as "bf16".
        device: the `jax.Device`.

    Returns:
        Operations per second, where a multiply-add counts as two.
    """
    operand, result, precision = _FORMATS[name]
    size = _SIZES.get(device.platform, 2048)
    generator = np.random.default_rng(0)
    # Random numbers, because accelerators use less power for zeros or ones and run at a higher clock.
    values = generator.standard_normal((size, size), np.float32)
    values = values * 32 if operand is jnp.int8 else values
    a, b = (jax.device_put(jnp.asarray(x, operand), device) for x in (values, values.T.copy()))
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision, preferred_element_type=result))
    return 2 * size**3 / call_seconds(lambda: multiply(a, b))


def all_reduce_rate() -> float:
    """Measure the bytes per second of a sum over all n devices: 2 (n - 1) / n of an array over the time of its sum."""
    devices = jax.devices()
    count = len(devices)
    mesh = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))
    spec, size = PartitionSpec("all"), _ALL_REDUCE_BYTES.get(devices[0].platform, 2**24) // 4
    make = jax.jit(lambda: jnp.ones((count, size), jnp.float32), out_shardings=NamedSharding(mesh, spec))
    array = make()
    total = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    )

    def call() -> jax.Array:
        # Emulated devices share a thread pool, so that two sums at the same time can wait for each other forever.
        return jax.block_until_ready(total(array))

    return 2 * (count - 1) / count * size * 4 / call_seconds(call)
