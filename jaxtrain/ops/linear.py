"""A linear layer over the last dims of its input, in the number format that the step asks for.

Shapes: N tokens or rows, D input features, F output features.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import splits_sequence
from jaxtrain.ops.fp8 import fp8_matmul
from jaxtrain.ops.int8 import int8_matmul
from jaxtrain.precision.quantized import QuantizedKernel

# What linear layers multiply in, and one entry a layer that did, of the step that is being traced. Set by
# `use_linear_format` around a trace, never globally.
_format: contextvars.ContextVar[tuple[str, list[str]] | None] = contextvars.ContextVar("linear_format", default=None)


@contextlib.contextmanager
def use_linear_format(name: str | None, *, required_of: str | None = None) -> Iterator[None]:
    """Multiply linear layers in a format while a model is traced.

    Args:
        name: "fp8"; None: the dtype of the operands.
        required_of: a model, for the error where none of its layers multiplied in the format.

    Raises:
        ConfigError: so, or a format that is not known.
    """
    if name not in (None, "fp8"):
        raise ConfigError(f"no linear_format {name!r} to train in; known: fp8, or None for the compute dtype")
    layers: list[str] = []
    token = _format.set(None if name is None else (name, layers))
    try:
        yield
    finally:
        _format.reset(token)
    if name is not None and required_of is not None and not layers:
        raise ConfigError(
            f"precision.policy={name} is for linear layers (jaxtrain.models.layers.Linear), and the model "
            f"{required_of} has none: nothing would run in it; use precision.policy=bf16"
        )


def linear(
    x: jax.Array,
    kernel: jax.Array | QuantizedKernel,
    bias: jax.Array | None = None,
    *,
    num_input_dims: int = 1,
    low_precision: bool = False,
) -> jax.Array:
    """x @ kernel (+ bias), contracting the last `num_input_dims` dims of x with the first ones of the kernel.

    Leading dims are flattened before the product: the transposed products that autodiff makes from a 3-D one miss
    XLA's fast path on CPU (55 against 24.5 ms for one layer's backward, `docs/benchmarks.md`). Where the sequence is
    spread over devices they stay apart, because rows of two spread dims are no contiguous block of one.

    Args:
        x: [..., *D], any float dtype.
        kernel: [*D, *F], the same dtype; or quantized.
        bias: [*F] or None.
        num_input_dims: how many dims D has.
        low_precision: whether the step's format applies, as it does to the layers of blocks; not to output layers.

    Returns:
        [..., *F] in the dtype of x.
    """
    leading, inputs = x.shape[: x.ndim - num_input_dims], kernel.shape[:num_input_dims]
    outputs = kernel.shape[num_input_dims:]
    rows = leading if splits_sequence() else (math.prod(leading),)
    x_ND = x.reshape(*rows, math.prod(inputs))
    kernel_DF = kernel.reshape(math.prod(inputs), math.prod(outputs))
    wanted = _format.get() if low_precision else None
    if isinstance(kernel_DF, QuantizedKernel):
        y_NF = int8_matmul(x_ND, kernel_DF)
    elif wanted is None:
        y_NF = jnp.dot(x_ND, kernel_DF)
    else:
        wanted[1].append(wanted[0])
        y_NF = fp8_matmul(x_ND, kernel_DF)
    if bias is not None:
        y_NF = y_NF + bias.reshape(-1)
    return y_NF.reshape(*leading, *outputs)
