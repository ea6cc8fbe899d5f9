"""The compiler: options for XLA by backend, each with its reason; where compiled programs are kept; what was chosen.

Options are passed with the program (`jax.jit(compiler_options=...)`), never through XLA_FLAGS: an unknown flag in the
environment ends the process, whereas an unknown option raises an error that can be caught.
"""

import contextlib
import contextvars
import functools
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.config.arguments import local_path
from jaxtrain.errors import ConfigError, first_line
from jaxtrain.runtime.terminal import print_remark

Value = bool | int | float | str
_UNKNOWN = "No such compile option"

# Backend, as in `device.platform` -> name -> value; what a compiler does not know is left out. Of every program:
OPTIONS: dict[str, dict[str, Value]] = {
    # With it, batched products (attention) run on one thread; without it, Eigen's products run on all. jax 0.10.2 and
    # 0.12.0.1, 2 cores: 96 products of 256 x 64 x 256 take 10 ms with it and 6 ms without, a step of bench_cpu 2.25 and
    # 2.13 s (medians of 8 interleaved runs, busy machine).
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": ""},
}
# Of train steps on one device, and of those of models of convolutions:
OF_UPDATES: dict[str, dict[str, Value]] = {
    # Without it, the momentum of every parameter is copied before it is replaced, because the new parameters read it
    # too. jax 0.10.2, 29 MB of parameters, SGD with momentum: 5 copies and 23 ms of processor time without it, none and
    # 11 ms with it (medians of nine); AdamW and 53 M parameters of experts: 160 MB of temporaries less.
    "cpu": {"xla_cpu_copy_insertion_use_region_analysis": True},
}
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
# Of programs of several devices:
OF_SEVERAL: dict[str, dict[str, Value]] = {
    # Gathers the next layer's weights and reduces the last layer's gradients during this layer. jax 0.10.2 (by the
    # second names), compiled for 8 x H100, Llama-3 8B, fsdp=8, one sequence of 8,192 per GPU: 0 of 15 collectives of
    # the layer loops have no matmul beside them, 3 (128 MiB) without; temporaries take 9.71 GiB instead of 8.92. From
    # jax 0.12 on the first names are known, and the second are accepted and mean nothing. Never run on a GPU.
    "gpu": {
        **{f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in _COLLECTIVES},
        **{f"xla_gpu_enable_pipelined_{kind}": True for kind in _COLLECTIVES},
    },
}
# TPUs have none: options that fuse collectives make the compiler for v5e run out of vmem on narrow models, and libtpu
# refused those for v5p ("incorrect results, hang, SDC"); docs/benchmarks.md has what they would give.

# For programs that feed a model one token of each row: they read every weight, and little else. Figures: jax 0.10.2,
# compiled for 8 x H100, one decode step of a Llama-3 8B of two layers, tensor=8, 8 rows of 2,048 positions; never run.
_DECODING: dict[str, dict[str, Value]] = {
    "gpu": {
        # Products of one input (query, key and value; gate and up) stay apart, so that each reads its kernel where it
        # stands in the stack; to merge them their kernels are copied: 144 MB more per device of 257 MB.
        "xla_gpu_dot_merger_threshold_mb": "0",
        # With it, the int8 kernels of all layers are converted to floats at once, which are written and read again:
        # 240 MB more per device of 195 MB.
        "xla_disable_hlo_passes": "slice-sinker",
    }
}


@dataclass(frozen=True)
class CompilerOptions:
    """Name -> value of each option that the compiler knows; a line per option of the user that it does not know."""

    used: Mapping[str, Value]
    dropped: tuple[str, ...] = ()


def choose_options(
    device: Any, num_devices: int, more: Mapping[str, Value] | None = None, *, updates: bool = False
) -> CompilerOptions:
    """The compiler options for a program of several devices like this one, real or compile-only.

    Args:
        more: Options of the user, which replace those of the tables.
        updates: Whether the program is a train step on one device, or one of a model of convolutions.

    Raises:
        ConfigError: The compiler knows an option of the user but refuses its value.
    """
    asked = dict(more or {})
    table = OPTIONS.get(device.platform, {})
    table = table | (OF_UPDATES.get(device.platform, {}) if updates else {})
    table = table | (OF_SEVERAL.get(device.platform, {}) if num_devices > 1 else {})
    wanted = table | asked
    refused = refused_options(device, tuple(sorted(wanted.items())))
    for name, why in refused.items():
        if name in asked and _UNKNOWN not in why:
            raise ConfigError(f"compiler_options.{name}={asked[name]}: {why}; use another value, or leave it out")
    dropped = (
        f"the compiler for {device.platform} does not support {name}, so it is left out"
        for name in refused
        if name in asked
    )
    return CompilerOptions({name: value for name, value in wanted.items() if name not in refused}, tuple(dropped))


def option_notes(options: CompilerOptions, *, asked: Iterable[str]) -> list[str]:
    """Lines for the banner: the user's options (`asked`), and those that the compiler does not accept."""
    shown = {name: options.used[name] for name in asked if name in options.used}
    used = ", ".join(f"{name}={value if value != '' else 'none'}" for name, value in shown.items())
    return [*([f"compiler options: {used}"] if used else []), *options.dropped]


@functools.lru_cache
def refused_options(device: Any, options: tuple[tuple[str, Value], ...]) -> dict[str, str]:
    """The options, (name, value), that the compiler of a device refuses: name -> first line of its error.

    Found by compiling a program of one addition.
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
            return first_line(error)
        return None

    if not options or refusal(dict(options)) is None:
        return {}
    # One by one, because an error names at most one option.
    alone = {name: refusal({name: value}) for name, value in options}
    return {name: why for name, why in alone.items() if why is not None}


@contextlib.contextmanager
def out_of_cache() -> Iterator[None]:
    """Keep programs that are compiled inside the context out of the persistent compilation cache.

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


@functools.lru_cache
def decoding_options(device: Any) -> dict[str, Value]:
    """The options of decoding programs that the compiler of a device accepts."""
    wanted = _DECODING.get(device.platform, {})
    refused = refused_options(device, tuple(sorted(wanted.items())))
    return {name: value for name, value in wanted.items() if name not in refused}


_notes: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("jaxtrain_choices", default=None)


@contextlib.contextmanager
def record_choices() -> Iterator[list[str]]:
    """Collect the lines of `note_choice` inside the context, each line once; a context around it gets them too."""
    notes: list[str] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)
        outer = _notes.get()
        if outer is not None:
            outer += [line for line in notes if line not in outer]


def note_choice(operation: str, chosen: str, refused: list[tuple[str, str]]) -> None:
    """Record which implementation an operation (such as "attention") uses while a step is traced.

    `refused` has each implementation that comes before it in the table, and why it was not chosen.
    """
    notes = _notes.get()
    line = f"{operation}: {chosen}" + "".join(f", not {name} ({why})" for name, why in refused)
    if notes is not None and line not in notes:
        notes.append(line)


def cache_folder(setting: str | None) -> Path | None:
    """Folder of compiled programs for `compilation_cache`: auto, a path, or None.

    `JAXTRAIN_CACHE_DIR` replaces the platform's cache folder under auto.
    """
    if setting is None:
        return None
    if setting != "auto":
        return local_path(setting, what="compilation_cache").expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = os.environ.get("JAXTRAIN_CACHE_DIR") or Path(home) / "jaxtrain"
    return local_path(root, what="JAXTRAIN_CACHE_DIR").expanduser() / "compiled"


def use_cache(setting: str | None) -> None:
    """Let jax keep compiled programs in the folder of `compilation_cache` (see `cache_folder`), made if need be.

    Raises:
        ConfigError: a folder that was asked for cannot be used; where it is that of auto, one line says so.
    """
    import jax

    folder = cache_folder(setting)
    if folder is None:
        return
    try:
        # Compiled programs are run as they are read: nobody else may write there.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"the compilation cache {folder} cannot be used: {error.strerror}"
        if setting != "auto" or os.environ.get("JAXTRAIN_CACHE_DIR"):
            raise ConfigError(f"{reason}; set compilation_cache=null or another folder") from None
        print_remark(f"{reason}; programs are compiled, but not cached")
    else:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
