"""Fills in the degrees of the six mesh axes and checks them against the device count. No jax here."""

import math
from collections.abc import Mapping
from typing import Literal

from jaxtrain.config.schema import AXES, ParallelConfig
from jaxtrain.errors import ConfigError


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def resolve_degrees(degrees: Mapping[str, int | Literal["auto"]], num_devices: int) -> dict[str, int]:
    """Fills in the degree that is `auto` and checks that the product of the degrees is the number of devices.

    Args:
        degrees: Mesh axis -> degree; an axis that is left out has degree 1.
        num_devices: Number of devices of the run, over all processes.

    Returns:
        Mesh axis -> degree for all six axes, in mesh order.

    Raises:
        ConfigError: Two degrees are auto, or the product is not `num_devices`; the message says what would work.
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
    if product > num_devices:
        remedy = f"lower a degree, or use {product} devices (on CPU: --emulate {product})"
    elif verb == "does not divide":
        low = [d for d in _divisors(num_devices) if d < product][-1]
        high = next(d for d in _divisors(num_devices) if d > product)
        remedy = f"use {low} or {high}"
    else:
        remedy = f"use degrees that multiply to {num_devices}, or parallel.data=auto for what the other axes leave"
    return f"parallel: {shown} makes {product}, which {verb} the number of devices ({num_devices}); {remedy}"


def config_degrees(config: ParallelConfig) -> dict[str, int | Literal["auto"]]:
    """Returns the degrees of a config, in which at most one axis should be auto.

    `data` is auto by default; it becomes 1 where the user set another axis to auto and did not set `data`. ZeRO stage 3
    over `data` is what the axis `fsdp` does, so with `zero=3` the degree of `data` moves to `fsdp` unless that is set.

    Args:
        config: The group `parallel`.

    Returns:
        Mesh axis -> degree for all six axes, in mesh order.
    """
    degrees: dict[str, int | Literal["auto"]] = {axis: getattr(config, axis) for axis in AXES}
    others_auto = any(degrees[axis] == "auto" for axis in AXES if axis != "data")
    if others_auto and "data" not in config.model_fields_set:
        degrees["data"] = 1
    if config.zero == 3 and "fsdp" not in config.model_fields_set:
        degrees["fsdp"], degrees["data"] = degrees["data"], 1
    return degrees
