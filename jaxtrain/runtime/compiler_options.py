"""A table of options for XLA by backend, each with its reason; a compiler that does not know an option goes without it.

They are passed to the compiler with the program (`jax.jit(compiler_options=...)`), never through XLA_FLAGS: an unknown
flag in the environment ends the process, whereas an unknown option raises an error that can be caught.
"""

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
        device_kinds: As in `device.device_kind`, the kinds that the option is for; empty: all of the backend.
        axes: The only mesh axes that may have several devices where the option is used; empty: all may.
        may_fail: Whether the compiler may give up on a program because of the option. Only steps that are compiled
            ahead of their first call get it, and go without it where that happens.
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
    device_kinds: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    may_fail: bool = False


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

_SEEN_V5E = (
    "libtpu 0.0.42.1, compiled for v5e:2x4, Llama-3 8B of 8 layers, fsdp=8, one sequence of 4,096 per chip "
    "(docs/benchmarks.md): 65 % of the bytes with both options, 43 % without. On a model of width 1,024 and rows of "
    "128 tokens the compiler runs out of vmem with them. Never run on a TPU"
)

# For layouts of data and fsdp, the only ones whose programs were looked at.
_TPU = tuple(
    Option(
        "tpu",
        name,
        True,
        "puts the steps of a reduce-scatter of gradients into the fusions of the matmuls beside it",
        _SEEN_V5E,
        device_kinds=("TPU v5 lite", "TPU v5e"),
        axes=("data", "fsdp"),
        may_fail=True,
    )
    for name in ("xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter", "xla_enable_async_reduce_scatter_fusion")
)

# These options were tried and left the program of jax 0.10.2 unchanged: the latency-hiding scheduler,
# optimization_level=1 and (data=8) the analytical latency estimator on H100; the scheduler on v5p; asynchronous
# collective fusion alone on v5e. Two collectives at a time (xla_gpu_experimental_parallel_collective_overlap_limit=2)
# took fsdp=8 on H100 from 90 to 89 % of bytes beside matmuls. On v5p fused all-gathers and all-reduces take fsdp=8 from
# 0 to 52 %, and are left out: libtpu 0.0.51 refused fused all-gathers there ("incorrect results, hang, SDC"), and that
# 0.0.42.1 compiles them without a word does not make them safe. What else was tried is in docs/benchmarks.md.
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
        "experts: 160 MB of temporaries less, copies of both moments less",
        several_devices=False,
        updates=True,
    ),
    *_GPU,
    *_TPU,
)


@dataclass(frozen=True)
class CompilerOptions:
    """The options for programs on some devices.

    Attributes:
        used: Name -> value of each option that the compiler knows.
        dropped: One line per option that the compiler does not know or refuses.
        tried: Name -> value of options that `tried_options.py` adds, and leaves out where the compiler gives up.
    """

    used: Mapping[str, Value]
    dropped: tuple[str, ...] = ()
    tried: Mapping[str, Value] = field(default_factory=dict)


def choose_options(
    device: Any,
    num_devices: int,
    more: Mapping[str, Value] | None = None,
    *,
    updates: bool = False,
    axes: Collection[str] | None = None,
) -> CompilerOptions:
    """Returns the compiler options for a program on devices like this one.

    Args:
        device: A `jax.Device`, real or compile-only.
        num_devices: Number of devices of the program.
        more: Options of the user, which replace those of the table.
        updates: Whether the program is a train step on one device, or one of a model of convolutions.
        axes: Mesh axes of several devices; None: unknown, so that options for some axes are left out.

    Raises:
        ConfigError: The compiler knows an option of the user but refuses its value.
    """
    table = [
        option
        for option in OPTIONS
        if option.backend == device.platform
        and (num_devices > 1 or not option.several_devices)
        and (updates or not option.updates)
        and (not option.device_kinds or device.device_kind in option.device_kinds)
        and (not option.axes or (axes is not None and set(axes) <= set(option.axes)))
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
    known = {name: value for name, value in {**instead, **wanted}.items() if name not in {**refused, **without}}
    tried = {option.name for option in table if option.may_fail} - set(asked)
    return CompilerOptions(
        {name: value for name, value in known.items() if name not in tried},
        tuple(
            f"the compiler for {device.platform} does not know {name}, so programs go without it"
            if _UNKNOWN in why
            else f"the compiler for {device.platform} refuses {name}, so programs go without it: {why}"
            for name, why in refused.items()
            if name not in older or older[name].older in without
        ),
        {name: value for name, value in known.items() if name in tried},
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
