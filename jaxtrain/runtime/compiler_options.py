"""A table of options for XLA by backend, each with its reason; a compiler that does not know an option goes without it.

They are passed to the compiler with the program (`jax.jit(compiler_options=...)`), never through XLA_FLAGS: an unknown
flag in the environment ends the process, whereas an unknown option raises an error that can be caught.
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
        backend: The backend, as in `device.platform`.
        name: Name of the option in XLA.
        value: Value of the option.
        reason: Its effect on our programs.
        seen: Where that effect was measured.
        several_devices: Whether the option is for programs of several devices only.
        updates: Whether the option is only for train steps on one device, and for those of models of convolutions.
        older: Name of the option in older compilers; None: the same.
        older_value: Value of the option under its older name.
    """

    backend: str
    name: str
    value: Value
    reason: str
    seen: str
    several_devices: bool = True
    updates: bool = False
    older: str | None = None
    older_value: Value = True


_PIPELINED = (
    "gathers the next layer's weights and reduces the last layer's gradients during this layer: without it each layer "
    "of an fsdp stack waits for its first gather and its last reduce-scatter; with all three options no layer waits"
)
_SEEN_PIPELINED = (
    "jax 0.10.2 (by the older name), compiled for 8 x H100, Llama-3 8B, fsdp=8, one sequence of 8,192 per GPU: 0 of 15 "
    "collectives of the layer loops have no matmul beside them, 3 (128 MiB) without the options; temporaries take "
    "9.71 GiB instead of 8.92. jax 0.12 knows the name; never run on a GPU"
)

_GPU = tuple(
    Option(
        "gpu",
        f"xla_gpu_pipeline_{kind}",
        "COLLECTIVE_PIPELINING_MODE_ON",
        _PIPELINED,
        _SEEN_PIPELINED,
        # From jax 0.12 on the older name is accepted and means the default.
        older=f"xla_gpu_enable_pipelined_{kind}",
    )
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
)

# These options were tried and left the program of jax 0.10.2 unchanged: the latency-hiding scheduler,
# optimization_level=1 and (data=8) the analytical latency estimator on H100; the scheduler on v5p; asynchronous
# collective fusion on v5e. Two collectives at a time (xla_gpu_experimental_parallel_collective_overlap_limit=2) took
# fsdp=8 on H100 from 90 to 89 % of bytes beside matmuls. On v5p libtpu refuses fused all-gathers ("incorrect results,
# hang, SDC"). Two that help by the schedule are left out: fused reduce-scatters on v5e
# (xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter with xla_enable_async_reduce_scatter_fusion) take fsdp=8
# of Llama-3 8B with 8 layers from 43.5 to 64.9 %, but with them libtpu 0.0.51 ran out of vmem at width 1,024;
# xla_tpu_decompose_einsum_reduce_scatter on v5p takes it from 0 to 35 %, but code of that was never generated.
OPTIONS = (
    Option(
        "cpu",
        "xla_cpu_experimental_ynn_fusion_type",
        "",
        "with it, batched products (attention) run on one thread; without it, Eigen's products run on all threads",
        "jax 0.10.2 and 0.12.0.1, 2 cores: 96 products of 256 x 64 x 256 take 10 ms with it and 6 ms without, a step "
        "of bench_cpu 2.25 and 2.13 s (medians of 8 interleaved runs, busy machine)",
        several_devices=False,
    ),
    Option(
        "cpu",
        "xla_cpu_copy_insertion_use_region_analysis",
        True,
        "without it, the momentum of every parameter is copied before it is replaced, because the new parameters read "
        "it too",
        "jax 0.10.2, 2 cores: 29 MB of parameters, SGD with momentum: 5 copies and 23 ms of processor time without it, "
        "none and 11 ms with it (medians of nine, one after the other, busy machine); AdamW and 53 M parameters of "
        "experts: 160 MB of temporaries less, copies of both moments less (scripts/bench_experts.py)",
        several_devices=False,
        updates=True,
    ),
    *_GPU,
)


@dataclass(frozen=True)
class CompilerOptions:
    """The options for programs on some devices.

    Attributes:
        used: Name -> value of each option that the compiler knows.
        dropped: One line per option that the compiler does not know or refuses.
    """

    used: Mapping[str, Value]
    dropped: tuple[str, ...] = ()


def choose_options(
    device: Any, num_devices: int, more: Mapping[str, Value] | None = None, *, updates: bool = False
) -> CompilerOptions:
    """Returns the compiler options for a program on devices like this one.

    Args:
        device: A `jax.Device`, real or compile-only.
        num_devices: Number of devices of the program.
        more: Options of the user, which replace those of the table.
        updates: Whether the program is a train step on one device, or one of a model of convolutions.

    Raises:
        ConfigError: The compiler knows an option of the user but refuses its value.
    """
    table = [
        option
        for option in OPTIONS
        if option.backend == device.platform
        and (num_devices > 1 or not option.several_devices)
        and (updates or not option.updates)
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
    """Returns lines for the banner: the user's options, and those that the compiler does not accept.

    Args:
        options: All options of a program; run.json records them.
        asked: Names of the user's options.
    """
    shown = {name: options.used[name] for name in asked if name in options.used}
    used = ", ".join(f"{name}={value if value != '' else 'none'}" for name, value in shown.items())
    return [*([f"compiler options: {used}"] if used else []), *options.dropped]


@functools.lru_cache
def refused_options(device: Any, options: tuple[tuple[str, Value], ...]) -> dict[str, str]:
    """Returns the options that the compiler of a device refuses, found by compiling a program of one addition.

    Args:
        device: A `jax.Device`, real or compile-only.
        options: (name, value) pairs.

    Returns:
        Name -> first line of the compiler's error.
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
    # One by one, because an error names at most one option.
    alone = {name: refusal({name: value}) for name, value in options}
    return {name: why for name, why in alone.items() if why is not None}


@contextlib.contextmanager
def out_of_cache() -> Iterator[None]:
    """Keeps programs that are compiled inside the context out of the persistent compilation cache.

    jax cannot load a program for absent hardware from the cache: there are no devices, so it warns and compiles again.
    """
    import jax

    # Attributes of jax.config are made at run time.
    kept_from = jax.config.jax_persistent_cache_min_compile_time_secs  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", kept_from)
