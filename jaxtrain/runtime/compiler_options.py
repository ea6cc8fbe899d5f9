"""Options for XLA as data: what each backend gets, why, and where it was seen; a compiler that lacks one goes without.

They are given to the compiler with the program (`jax.jit(compiler_options=...)`), never through XLA_FLAGS: an unknown
flag in the environment ends the process, an unknown option is an error that can be caught.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.errors import ConfigError

Value = bool | int | float | str
_UNKNOWN = "No such compile option"


@dataclass(frozen=True)
class Option:
    """One option of the compiler of a backend.

    Attributes:
        backend: `device.platform`.
        name, value: as XLA knows them.
        reason: what it does to our programs.
        seen: where that was seen.
        several_devices: whether it is for programs of several devices only.
        older: the name that older compilers know it by, with `older_value`.
    """

    backend: str
    name: str
    value: Value
    reason: str
    seen: str
    several_devices: bool = True
    older: str | None = None
    older_value: Value = True


_PIPELINED = (
    "prefetches what the next layer needs and lets the last layer's gradients travel: without it each layer of an fsdp "
    "stack waits for its first gather and its last reduce-scatter, with all three of these nothing in the loop waits"
)
_SEEN_PIPELINED = (
    "jax 0.10.2 (by the older name), compiled for 8 x H100, Llama-3 8B, fsdp=8, one sequence of 8,192 a card: 0 of 15 "
    "collectives of the layer loops stand without a matmul beside them, 3 (128 MiB) without the options; temporaries "
    "9.71 GiB instead of 8.92. jax 0.12 knows the name; compiled on no GPU, run on no card"
)

_GPU = tuple(
    Option(
        "gpu",
        f"xla_gpu_pipeline_{kind}",
        "COLLECTIVE_PIPELINING_MODE_ON",
        _PIPELINED,
        _SEEN_PIPELINED,
        # From jax 0.12 on this still parses, and means the default.
        older=f"xla_gpu_enable_pipelined_{kind}",
    )
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
)

# What is not here was tried and gave the very program that jax 0.10.2 gives without it: the latency-hiding scheduler
# and optimization_level=1 on H100, the scheduler on v5p, asynchronous collective fusion on v5e; on v5p libtpu refuses
# the last ("incorrect results, hang, SDC").
OPTIONS = (
    Option(
        "cpu",
        "xla_cpu_experimental_ynn_fusion_type",
        "",
        "its batched products (attention) run on one thread; Eigen's, which come without it, on all",
        "jax 0.10.2 and 0.12.0.1: 96 products of 256 x 64 x 256 take 10 ms with it and 6 without on 2 cores, a step of "
        "bench_cpu 2.25 and 2.13 s (medians of 8 interleaved, machine busy)",
        several_devices=False,
    ),
    *_GPU,
)


@dataclass(frozen=True)
class CompilerOptions:
    """What the compiler of some devices is given.

    Attributes:
        used: name -> value, every one known to it.
        dropped: a line for each that it does not know.
    """

    used: Mapping[str, Value]
    dropped: tuple[str, ...] = ()


def choose_options(device: Any, num_devices: int, more: Mapping[str, Value] | None = None) -> CompilerOptions:
    """The options for a program on devices like this one.

    Args:
        device: a `jax.Device`, real or compile-only.
        num_devices: of the program.
        more: the user's, over those of the table.

    Raises:
        ConfigError: a value that the compiler does not take for an option that it knows.
    """
    table = [
        option
        for option in OPTIONS
        if option.backend == device.platform and (num_devices > 1 or not option.several_devices)
    ]
    asked = dict(more or {})
    wanted = {option.name: option.value for option in table} | asked
    refused = refused_options(device, tuple(sorted(wanted.items()))) if wanted else {}
    for name, why in refused.items():
        if name in asked and _UNKNOWN not in why:
            raise ConfigError(f"compiler_options.{name}={asked[name]}: {why}; use another value, or leave it out")
    older = {option.name: option for option in table if option.older is not None and option.name not in asked}
    instead = {older[name].older: older[name].older_value for name in refused if name in older}
    without = refused_options(device, tuple(sorted(instead.items()))) if instead else {}
    return CompilerOptions(
        {name: value for name, value in {**instead, **wanted}.items() if name not in {**refused, **without}},
        tuple(
            f"the compiler for {device.platform} does not know {name}, so programs go without it"
            if _UNKNOWN in why
            else f"the compiler for {device.platform} refuses {name}, so programs go without it: {why}"
            for name, why in refused.items()
            if name not in older or older[name].older in without
        ),
    )


def option_notes(options: CompilerOptions, *, asked: Iterable[str]) -> list[str]:
    """Lines for the banner: what the user asked for, and what the compiler does not take; run.json has all."""
    shown = {name: options.used[name] for name in asked if name in options.used}
    used = ", ".join(f"{name}={value if value != '' else 'none'}" for name, value in shown.items())
    return [*([f"compiler options: {used}"] if used else []), *options.dropped]


@functools.lru_cache
def refused_options(device: Any, options: tuple[tuple[str, Value], ...]) -> dict[str, str]:
    """Name -> first line of what the compiler of a device says against an option; asked with a program of one addition.

    Args:
        device: a `jax.Device`, real or compile-only.
        options: (name, value) pairs.
    """
    import jax
    import jax.numpy as jnp

    sharding = jax.sharding.SingleDeviceSharding(device)
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding))

    def refusal(given: Mapping[str, Any]) -> str | None:
        try:
            with out_of_cache():
                lowered.compile(compiler_options={**given})
        except (RuntimeError, TypeError, ValueError) as error:
            return (str(error).splitlines() or [type(error).__name__])[0]
        return None

    if refusal(dict(options)) is None:
        return {}
    # One by one: an error names one option at most, and not every error does.
    alone = {name: refusal({name: value}) for name, value in options}
    return {name: why for name, why in alone.items() if why is not None}


@contextlib.contextmanager
def out_of_cache() -> Iterator[None]:
    """Keep what is compiled inside out of the folder of compiled programs.

    A program for absent hardware could not be loaded from it: there are no devices, so jax warns and compiles again.
    """
    import jax

    # Attributes of jax.config are made at run time.
    kept_from = jax.config.jax_persistent_cache_min_compile_time_secs  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", kept_from)
