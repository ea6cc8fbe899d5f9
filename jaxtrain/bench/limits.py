"""Measured limits of a device: matmuls in each number format, memory, and sums over devices; the timing of a call."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxtrain.runtime.devices import memory_bytes_per_second

# A round must be much longer than a dispatch, about 0.1 ms, and than the resolution of the clock.
_ROUND_SECONDS = 0.02
_ROUNDS, _BUDGET_SECONDS = 5, 1.0
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
# Formats with units on a platform; elsewhere they would be emulated. Of a GPU also its compute capability.
_PLATFORM_FORMATS = {"cpu": ("fp32", "bf16"), "tpu": ("fp32", "bf16", "int8")}
_SINCE = {"tf32": 8.0, "bf16": 8.0, "fp16": 7.0, "fp8": 8.9, "int8": 7.5}


def call_seconds(call: Callable[[], object]) -> float:
    """The median seconds of a call over five rounds, or fewer where these would exceed the budget.

    On accelerators the end of a round waits for the device, so that dispatches overlap; on a CPU, which may run several
    calls at once, each call is waited for.
    """
    in_turn = jax.default_backend() == "cpu"
    jax.block_until_ready(call())
    began = time.perf_counter()
    jax.block_until_ready(call())
    once = max(time.perf_counter() - began, 1e-6)
    calls = max(1, round(_ROUND_SECONDS / once))
    rounds: list[float] = []
    while len(rounds) < _ROUNDS and (not rounds or sum(rounds) * calls < _BUDGET_SECONDS):
        began = time.perf_counter()
        result = None
        for _ in range(calls):
            # One result at a time, because it may fill most of the memory, or be donated to the next call.
            result = call()
            if in_turn:
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        rounds.append((time.perf_counter() - began) / calls)
    return statistics.median(rounds)


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
        has_units = name in _PLATFORM_FORMATS.get(device.platform, _FORMATS)
        has_units &= float(getattr(device, "compute_capability", None) or 99) >= _SINCE.get(name, 0.0)
        matmul[name] = _matmul_rate(name, device) if has_units else None
        if not has_units:
            reasons[f"matmul.{name}"] = f"a {device.device_kind} has no units for it"
    all_reduce = _all_reduce_rate() if jax.device_count() > 1 else None
    if all_reduce is None:
        reasons["all_reduce"] = "one device"
    return Limits(matmul, memory_bytes_per_second(device=device), all_reduce, reasons)


def _matmul_rate(name: str, device: Any) -> float:
    """Operations per second of a square product in a number format, where a multiply-add counts as two."""
    operand, result, precision = _FORMATS[name]
    size = _SIZES.get(device.platform, 2048)
    # Random numbers, because accelerators use less power for zeros or ones and run at a higher clock.
    values = np.random.default_rng(0).standard_normal((size, size), np.float32)
    values = values * 32 if operand is jnp.int8 else values
    a, b = (jax.device_put(jnp.asarray(x, operand), device) for x in (values, values.T.copy()))
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision, preferred_element_type=result))
    return 2 * size**3 / call_seconds(lambda: multiply(a, b))


def _all_reduce_rate() -> float:
    """Bytes per second of a sum over all n devices: 2 (n - 1) / n of an array over the time of its sum."""
    devices = jax.devices()
    count = len(devices)
    mesh = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))
    spec, size = PartitionSpec("all"), _ALL_REDUCE_BYTES.get(devices[0].platform, 2**24) // 4
    make = jax.jit(lambda: jnp.ones((count, size), jnp.float32), out_shardings=NamedSharding(mesh, spec))
    array = make()
    total = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    )
    # Each is waited for: emulated devices share a thread pool, so that two sums at the same time can wait for each
    # other forever.
    seconds = call_seconds(lambda: jax.block_until_ready(total(array)))
    return 2 * (count - 1) / count * size * 4 / seconds
