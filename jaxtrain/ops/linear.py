"""A linear layer over the last dims of its input, in the number format that the step asks for.

Shapes: N rows (one dim or several), I input features, O output features.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import splits_sequence
from jaxtrain.ops.fp8 import fp8_matmul
from jaxtrain.ops.int8 import int8_matmul
from jaxtrain.ops.low_rank import adapter_inputs, low_rank_matmul
from jaxtrain.ops.nf4 import nf4_matmul
from jaxtrain.ops.ranks import aligned
from jaxtrain.precision.low_rank import LowRankKernel
from jaxtrain.precision.nf4 import Nf4Kernel
from jaxtrain.precision.quantized import QuantizedKernel

# The number format of the step that is being traced, and one entry per layer that was multiplied in it. Set by
# `use_linear_format` around a trace, never globally.
_format: contextvars.ContextVar[tuple[str, list[str]] | None] = contextvars.ContextVar("linear_format", default=None)
# The entry of a layer whose kernel is stored in a format of its own, in which it is multiplied.
_STORED = "stored"


@contextlib.contextmanager
def use_linear_format(name: str | None, *, required_of: str | None = None) -> Iterator[None]:
    """Set the number format in which linear layers are multiplied while a model is traced.

    Args:
        name: "fp8"; None: the dtype of the operands.
        required_of: name of a model that must have at least one layer multiplied in the format; None: no such check.

    Raises:
        ConfigError: the format is not known, or no layer of the model was multiplied in it.
    """
    if name not in (None, "fp8"):
        raise ConfigError(f"no linear_format {name!r} to train in; known: fp8, or None for the compute dtype")
    layers: list[str] = []
    token = _format.set(None if name is None else (name, layers))
    try:
        yield
    finally:
        _format.reset(token)
    if name is None or required_of is None or name in layers:
        return
    if _STORED in layers:
        raise ConfigError(
            f"precision.policy={name} multiplies kernels of floats, and those of the model {required_of} are stored in "
            "int8 or nf4: nothing would run in it; use precision.policy=bf16, or leave base= of jt.adapt out"
        )
    raise ConfigError(
        f"precision.policy={name} is for linear layers (jaxtrain.models.layers.Linear), and the model "
        f"{required_of} has none: nothing would run in it; use precision.policy=bf16"
    )


def linear(
    x: jax.Array,
    kernel: jax.Array | QuantizedKernel | Nf4Kernel | LowRankKernel,
    bias: jax.Array | None = None,
    *,
    num_input_dims: int = 1,
    low_precision: bool = False,
) -> jax.Array:
    """Multiply x @ kernel, and add the bias.

    The last `num_input_dims` dims of x are contracted with the first ones of the kernel. Leading dims are flattened
    before the product, because the transposed products that autodiff makes from a 3-D product miss XLA's fast path on
    CPU (55 instead of 24.5 ms for the backward pass of one layer, `docs/benchmarks.md`). Where the sequence is sharded
    they stay separate, because the rows of two sharded dims are not a contiguous block of one dim.

    Args:
        x: [..., *I], any float dtype.
        kernel: [*I, *O], the same dtype; or quantized, or with a low-rank adapter.
        bias: [*O] or None.
        num_input_dims: number of dims of *I.
        low_precision: whether the number format of `use_linear_format` applies, as it does to the layers of blocks
            but not to output layers.

    Returns:
        [..., *O] in the dtype of x.
    """
    leading, inputs = x.shape[: x.ndim - num_input_dims], kernel.shape[:num_input_dims]
    outputs = kernel.shape[num_input_dims:]
    rows = leading if splits_sequence() else (math.prod(leading),)
    sizes = (math.prod(inputs), math.prod(outputs))
    wanted = _format.get() if low_precision else None
    if isinstance(kernel, LowRankKernel):
        y_NO = _adapted(x, kernel, rows, sizes, wanted)
    else:
        y_NO = _product(x.reshape(*rows, sizes[0]), kernel.reshape(*sizes), wanted)
    if bias is not None:
        y_NO = y_NO + aligned(bias.reshape(-1), y_NO)
    return y_NO.reshape(*leading, *outputs)


def _adapted(
    x: jax.Array,
    kernel: LowRankKernel,
    rows: tuple[int, ...],
    sizes: tuple[int, int],
    wanted: tuple[str, list[str]] | None,
) -> jax.Array:
    """x @ base + scale * (x @ lora_a) @ lora_b, for a backward pass that keeps the arguments as they came.

    The kernel is a slice of the parameters, and layers side by side (query, key and value) have the same x, so that
    neither takes memory of its own. Autodiff would keep both for each layer in the shapes that are multiplied: 15 % of
    the temporary memory of a step on CPU (SmolLM2-135M, rank 16, 4 rows of 256 tokens, jax 0.10.2). What is computed
    again in the backward pass is x @ lora_a; everything else is reshaped.

    Args:
        x: [..., *I].
        kernel: [*I, *O], of one layer.
        rows: *N.
        sizes: I and O.
        wanted: as in `_format`.

    Returns:
        [*N, O].
    """

    def both(x: jax.Array, dropped: jax.Array, kernel: LowRankKernel) -> jax.Array:
        x_NI, dropped_NI = (one.reshape(*rows, sizes[0]) for one in (x, dropped))
        kernel_IO = kernel.reshape(*sizes)
        return _product(x_NI, kernel_IO.base, wanted) + low_rank_matmul(dropped_NI, kernel_IO)

    arguments = (x, adapter_inputs(x, kernel), replace(kernel, key=None))
    if wanted is not None:  # the backward pass would round to the format once more
        return both(*arguments)
    return jax.checkpoint(both, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)(*arguments)


def _product(x_NI: jax.Array, kernel_IO: Any, wanted: tuple[str, list[str]] | None) -> jax.Array:
    """x @ kernel for every kind of kernel without an adapter; `wanted` as in `_format`."""
    if wanted is not None:
        wanted[1].append(_STORED if isinstance(kernel_IO, QuantizedKernel | Nf4Kernel) else wanted[0])
    if isinstance(kernel_IO, QuantizedKernel):
        return int8_matmul(x_NI, kernel_IO)
    if isinstance(kernel_IO, Nf4Kernel):
        return nf4_matmul(x_NI, kernel_IO)
    if wanted is None:
        return jnp.dot(x_NI, kernel_IO)
    return fp8_matmul(x_NI, kernel_IO)
