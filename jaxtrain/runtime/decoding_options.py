"""Options of XLA for programs that feed a model one token of each row: they read every weight, and little else."""

import functools
from typing import Any

from jaxtrain.runtime.compiler_options import Option, Value, refused_options

_SEEN = (
    "jax 0.10.2, compiled for 8 x H100, one decode step of a Llama-3 8B of two layers, tensor=8, 8 rows of 2,048 "
    "positions; never run on a GPU"
)

OPTIONS = (
    Option(
        "gpu",
        "xla_gpu_dot_merger_threshold_mb",
        "0",
        "products of one input (query, key and value; gate and up) stay apart, so that each reads its kernel where it "
        "stands in the stack; to merge them their kernels are copied: 144 MB more per device of 257 MB",
        _SEEN,
        several_devices=False,
    ),
    Option(
        "gpu",
        "xla_disable_hlo_passes",
        "slice-sinker",
        "with it, the int8 kernels of all layers are converted to floats at once, which are written and read again: "
        "240 MB more per device of 195 MB",
        _SEEN,
        several_devices=False,
    ),
)


@functools.lru_cache
def decoding_options(device: Any) -> dict[str, Value]:
    """The options that the compiler of a device accepts, as `jax.jit(compiler_options=...)` takes them.

    Args:
        device: a `jax.Device`, real or compile-only.
    """
    wanted = {option.name: option.value for option in OPTIONS if option.backend == device.platform}
    refused = refused_options(device, tuple(sorted(wanted.items()))) if wanted else {}
    return {name: value for name, value in wanted.items() if name not in refused}
