"""Degrees of the six mesh axes: filled in and checked against a device count. No jax here."""

import math
from collections.abc import Mapping
from typing import Literal

from jaxtrain.config.schema import AXES, ParallelConfig
from jaxtrain.errors import ConfigError


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def resolve_degrees(degrees: Mapping[str, int | Literal["auto"]], num_devices: int) -> dict[str, int]:
    """Fill in the one `auto` degree and check that the degrees multiply to the device count.

    Args:
        degrees: axis -> degree; axes left out are 1.
        num_devices: devices of the run, over all processes.

    Returns:
        Axis -> degree for all six axes, in mesh order.

    Raises:
        ConfigError: two autos, or a product that is not `num_devices`; names sizes that work.
    """
    autos = [axis for axis in AXES if degrees.get(axis, 1) == "auto"]
    if len(autos) > 1:
        raise ConfigError(f"parallel.{autos[0]} and parallel.{autos[1]} are both auto; at most one axis can be")
    fixed = {axis: int(degrees.get(axis, 1)) for axis in AXES if axis not in autos}
    product = math.prod(fixed.values())
    shown = " x ".join(f"{axis}={degree}" for axis, degree in fixed.items() if degree > 1) or "all degrees 1"
    if autos:
        if num_devices % product:
            raise ConfigError(_mismatch(shown, product, num_devices, "does not divide"))
        fixed[autos[0]] = num_devices // product
    elif product != num_devices:
        raise ConfigError(_mismatch(shown, product, num_devices, "is not"))
    return {axis: fixed[axis] for axis in AXES}


def _mismatch(shown: str, product: int, num_devices: int, verb: str) -> str:
    plural = "device" if num_devices == 1 else "devices"
    if product > num_devices:
        remedy = f"lower a degree, or try on CPU with --emulate {product}"
    elif verb == "does not divide":
        low = [d for d in _divisors(num_devices) if d < product][-1]
        high = next(d for d in _divisors(num_devices) if d > product)
        remedy = f"use {low} or {high}"
    else:
        remedy = f"use degrees that multiply to {num_devices}, or parallel.data=auto for what the other axes leave"
    return f"parallel: {shown} makes {product}, which {verb} the {num_devices} {plural} there; {remedy}"


def config_degrees(config: ParallelConfig) -> dict[str, int | Literal["auto"]]:
    """Degrees as set; `data`, auto by default, stands back when the user made another axis auto.

    ZeRO-3 over `data` is `fsdp`: without a degree for that axis, `data` becomes it.
    """
    degrees: dict[str, int | Literal["auto"]] = {axis: getattr(config, axis) for axis in AXES}
    others_auto = any(degrees[axis] == "auto" for axis in AXES if axis != "data")
    if others_auto and "data" not in config.model_fields_set:
        degrees["data"] = 1
    if config.zero == 3 and "fsdp" not in config.model_fields_set:
        degrees["fsdp"], degrees["data"] = degrees["data"], 1
    return degrees
