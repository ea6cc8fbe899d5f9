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
from jax import Array

from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import splits_sequence
from jaxtrain.ops.elementwise import aligned, drop_by_row
from jaxtrain.ops.low_precision import fp8_matmul, int8_matmul, nf4_matmul
from jaxtrain.precision.kernels import LowRankKernel, QuantizedKernel
from jaxtrain.precision.nf4 import Nf4Kernel

# The layers of the model being traced that were multiplied in 8-bit floats, where they are to be; None: in the dtype of
# their operands. Set by `use_linear_format` around a trace, never globally.
Layers = list[tuple[int, ...]]
_in_fp8: contextvars.ContextVar[Layers | None] = contextvars.ContextVar("in_fp8", default=None)


@contextlib.contextmanager
def use_linear_format(name: str | None, *, required_of: str | None = None) -> Iterator[None]:
    """Set the number format in which linear layers are multiplied while a model is traced.

    Args:
        name: "fp8"; None: the dtype of the operands.
        required_of: name of a model that must have at least one layer multiplied in the format; None: no such check.

    Raises:
        ConfigError: no layer of the model was multiplied in the format.
    """
    layers: Layers = []
    token = _in_fp8.set(None if name is None else layers)
    try:
        yield
    finally:
        _in_fp8.reset(token)
    if name is not None and required_of is not None and not layers:
        raise ConfigError(
            f"precision.policy={name} is for linear layers with kernels of floats (jaxtrain.models.layers.Linear), and "
            f"the model {required_of} has none; use precision.policy=bf16"
        )


def linear(
    x: Array, kernel: Any, bias: Array | None = None, *, num_input_dims: int = 1, low_precision: bool = False
) -> Array:
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
    in_fp8 = _in_fp8.get() if low_precision else None
    if isinstance(kernel, LowRankKernel):
        y_NO = _adapted(x, kernel, rows, sizes, in_fp8)
    else:
        y_NO = _product(x.reshape(*rows, sizes[0]), kernel.reshape(*sizes), in_fp8)
    if bias is not None:
        y_NO = y_NO + aligned(bias.reshape(-1), y_NO)
    return y_NO.reshape(*leading, *outputs)


def _adapted(
    x: Array, kernel: LowRankKernel, rows: tuple[int, ...], sizes: tuple[int, int], in_fp8: Layers | None
) -> Array:
    """x @ base + scale * (x @ lora_a) @ lora_b: [*N, O], for a backward pass that keeps the arguments as they came.

    The kernel is a slice of the parameters, and layers side by side (query, key and value) have the same x, so that
    neither takes memory of its own. Autodiff would keep both for each layer in the shapes that are multiplied: 15 % of
    the temporary memory of a step on CPU (SmolLM2-135M, rank 16, 4 rows of 256 tokens, jax 0.10.2). What is computed
    again in the backward pass is x @ lora_a; everything else is reshaped.
    """

    def both(x: Array, dropped: Array, kernel: LowRankKernel) -> Array:
        x_NI, dropped_NI = (one.reshape(*rows, sizes[0]) for one in (x, dropped))
        kernel_IO = kernel.reshape(*sizes)
        return _product(x_NI, kernel_IO.base, in_fp8) + kernel_IO.scale * jnp.dot(
            jnp.dot(dropped_NI, kernel_IO.lora_a), kernel_IO.lora_b
        )

    dropped = x
    if kernel.key is not None and kernel.dropout > 0:
        dropped = drop_by_row(x, kernel.dropout, kernel.key)
    arguments = (x, dropped, replace(kernel, key=None))
    if in_fp8 is not None:  # the backward pass would round to the format once more
        return both(*arguments)
    return jax.checkpoint(both, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)(*arguments)


def _product(x_NI: Array, kernel_IO: Any, in_fp8: Layers | None) -> Array:
    """x @ kernel for every kind of kernel without an adapter; one that is stored in a format is multiplied in it."""
    if isinstance(kernel_IO, QuantizedKernel):
        return int8_matmul(x_NI, kernel_IO)
    if isinstance(kernel_IO, Nf4Kernel):
        return nf4_matmul(x_NI, kernel_IO)
    if in_fp8 is None:
        return jnp.dot(x_NI, kernel_IO)
    in_fp8.append(kernel_IO.shape)
    return fp8_matmul(x_NI, kernel_IO)
