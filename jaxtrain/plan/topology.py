"""Devices of hardware that is not here, for which its own compiler compiles: TPUs through libtpu, GPUs through CUDA.

This is the one file that uses private names of jax. `jax.experimental.topologies` makes the devices, but of a platform
that jax was not started on the plugin must be initialized, and no public name does that (`jaxlib.xla_client`); nor does
one say whether jax has started (`jax._src.xla_bridge`).
"""

import importlib.util
import math
import os
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

from jaxtrain.errors import ConfigError
from jaxtrain.runtime.compiler import out_of_cache

if TYPE_CHECKING:
    import jax

# Not v4: without a flag of its own libtpu gives two devices for each of its chips, where a TPU VM has one.
TPU_TYPES = ("v5e", "v5p", "v6e", "tpu7x")
# Named as the file in targets/ that describes the card.
GPU_TYPES = ("h100", "h200")

_WRITE = "write TYPE:SHAPE, as in v5e:2x4, v5p:2x2x2, v6e:4x4 (chips of a TPU slice) or h100:2x8 (hosts x GPUs)"
# For loading libtpu, which looks for the TPU of its machine and complains where there is none. None of these says
# anything about the topology that is asked for.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # One process at a time may use the chips; compiling uses none.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Otherwise each load leaves a file in /tmp/tpu_logs.
    "TPU_LOG_DIR": "disabled",
}


class CompilerMissingError(ConfigError):
    """The compiler for some hardware is not installed, or cannot be loaded."""


def check_installed(kind: str) -> None:
    """Raise a `CompilerMissingError` that says what to install where the compiler for a type is not installed."""
    if kind in GPU_TYPES:
        found = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
        compiler, extra = "jax's CUDA plugin", "aot"
    else:
        found = importlib.util.find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ
        compiler, extra = "libtpu", "aot-tpu"
    if not found:
        line = f"compiling for {kind} takes {compiler}, which is not installed: pip install '.[{extra}]'"
        raise CompilerMissingError(line)


def topology_devices(name: str, *, num_slices: int = 1) -> list[Any]:
    """Compile-only devices: for a mesh of them programs are lowered, and compiled with `compile_for`, but not run.

    Where jax has not started and no platform was chosen, it starts on the CPU.

    Args:
        name: TPU type and shape of the slice in chips (`v5e:2x4`), or GPU type and hosts x GPUs (`h100:2x8`).
        num_slices: TPU slices, joined by the network of the data centre.

    Returns:
        The devices of all hosts.

    Raises:
        ConfigError: an unknown type, or a shape that libtpu refuses; it takes slices larger than are sold.
        CompilerMissingError: libtpu or jax's CUDA plugin is missing; says what to install.
    """
    kind, _, shape = name.partition(":")
    if kind in TPU_TYPES and re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        check_installed(kind)
        return _tpu_devices(name, math.prod(map(int, shape.split("x"))), num_slices)
    if kind in GPU_TYPES and re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape) and num_slices == 1:
        check_installed(kind)
        return _gpu_devices(kind, shape)
    raise ConfigError(f"no hardware {name!r} of {', '.join([*TPU_TYPES, *GPU_TYPES])}; {_WRITE}")


def compile_for(device: Any, lowered: "jax.stages.Lowered") -> "jax.stages.Compiled":
    """Compile a program for compile-only devices; what comes has `memory_analysis()`, but cannot be called.

    Args:
        device: one of the devices that the program was lowered for; of a GPU no argument may lie on the host.
        lowered: as from `TrainStep.lower`.

    Raises:
        jax.errors.JaxRuntimeError: the program does not fit into the memory of a TPU (RESOURCE_EXHAUSTED). Of a GPU it
            is not an error: compare with the card.
    """
    # Kernels are chosen by running them, and there is no card to run them on.
    chosen: dict[str, Any] = {"xla_gpu_autotune_level": "0"} if device.platform == "gpu" else {}
    with out_of_cache():
        return lowered.compile(compiler_options=chosen or None)


def _tpu_devices(name: str, num_chips: int, num_slices: int) -> list[Any]:
    from jax.experimental import topologies

    running = _start_jax()
    options: dict[str, Any] = {} if num_slices == 1 else {"num_slices": num_slices}
    if num_chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)  # hosts have four unless told otherwise
    try:
        # Where a TPU is in use, libtpu is loaded and knows its machine.
        os.environ |= {} if running == "tpu" else _TPU_ENVIRONMENT | os.environ
        return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)
    except RuntimeError as error:
        raise ConfigError(f"no TPU slice {name}: {str(error).strip().partition(chr(10))[0][:200]}; {_WRITE}") from None


def _gpu_devices(kind: str, shape: str) -> list[Any]:
    from jax.experimental import topologies

    # The plugin refuses to register where there is no driver, unless it is told not to look.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    _start_jax()
    from jaxlib import xla_client

    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    target = (resources.files("jaxtrain.plan") / "targets" / f"{kind}.txtpb").read_text(encoding="utf-8")
    hosts, _, gpus = shape.partition("x")
    # Domains of fast links x hosts in each x GPUs in each.
    devices = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"{hosts}x1x{gpus}")
    return list(devices.devices)


def _start_jax() -> str:
    """Start jax, on the CPU where nobody chose otherwise; gives the platform that it runs on."""
    import jax
    from jax._src import xla_bridge

    chosen = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if chosen is None and not xla_bridge.backends_are_initialized():
        # Looking for accelerators prints complaints about each that there is a plugin but no device for.
        jax.config.update("jax_platforms", "cpu")
    # This also registers the plugins of the platforms that jax does not run on.
    return jax.devices()[0].platform
