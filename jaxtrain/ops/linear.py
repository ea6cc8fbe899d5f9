"""A linear layer over the last dims of its input, in floats or 8-bit floats, or with frozen kernels of int8 or nf4.

In 8-bit floats: e4m3 forward, e5m2 for gradients, and one scale per tensor, chosen from the tensor itself.

    y = x w        x and w rounded to float8_e4m3fn
    dx = dy w^T    dy rounded to float8_e5m2, w to float8_e4m3fn
    dw = x^T dy    x rounded to float8_e4m3fn, dy to float8_e5m2

Formats and scaling: Micikevicius et al. 2022, sections 3 and 4. The scale follows from the tensor's own largest
magnitude, so that no step's scale is out of date. Scales are powers of two: they commute with every rounding, so that
hardware units and their emulation give the same numbers except for the order (and, on Hopper, the width) of the sum,
and it does not matter which scale a shard chooses, except for values that round to subnormals.

Shapes: N rows (one dim or several), I input features, O output features.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import platform, splits_sequence
from jaxtrain.ops.elementwise import aligned, drop_by_row
from jaxtrain.precision.kernels import LowRankKernel, QuantizedKernel
from jaxtrain.precision.nf4 import Nf4Kernel, dequantize

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
            f"precision.policy={name} needs linear layers with float kernels (jaxtrain.models.layers.Linear), but "
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

    Autodiff would keep them for each layer in the shapes that are multiplied: 15 % of the temporary memory of a step on
    CPU (SmolLM2-135M, rank 16, 4 rows of 256 tokens, jax 0.10.2). Computed again is x @ lora_a alone.
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


# --- Products in 8-bit floats. ---

FORWARD = jnp.float8_e4m3fn
GRADIENT = jnp.float8_e5m2

# Largest numbers: 1.75 x 2^8 = 448 and 1.75 x 2^15 = 57344 (Micikevicius et al. 2022, table 1).
_TOP_EXPONENT = {jnp.dtype(FORWARD): 8, jnp.dtype(GRADIENT): 15}
_TOP_MANTISSA = 0x600000  # the mantissa of 1.75, in the bits of a float32
# The largest exponent of a scale. A tensor of smaller numbers than about 2^-85 loses some of its range, so that its
# scale stays a normal float32.
_MOST_EXPONENT = 100


class Scaled(NamedTuple):
    """A tensor in an 8-bit format: the tensor is `values` times `unit`.

    The unit is a power of two, float32 []; NaN where the tensor held an infinity or NaN.
    """

    values: Array
    unit: Array


def quantize(x: Array, dtype: DTypeLike) -> Scaled:
    """Round a tensor to `FORWARD` or `GRADIENT`, scaled by the largest power of two that keeps it in range.

    Values saturate and never overflow. An infinity or NaN anywhere makes the unit NaN, so that it reaches the result
    and the step can skip its update.

    Args:
        x: float32 or bfloat16, of any shape. The largest magnitude of a sharded tensor is taken over all shards,
            except over mesh axes that are manual in the code being traced.
        dtype: of the values.
    """
    largest = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    above = ((bits & 0x7FFFFF) > _TOP_MANTISSA).astype(jnp.int32)
    exponent = _TOP_EXPONENT[jnp.dtype(dtype)] - ((bits >> 23) - 127) - above
    exponent = jnp.minimum(exponent, _MOST_EXPONENT)  # at least -121, a normal float32 as its inverse is
    limit = float(jnp.finfo(dtype).max)
    values = jnp.clip(x.astype(jnp.float32) * _power_of_two(exponent), -limit, limit).astype(dtype)
    return Scaled(values, jnp.where(jnp.isfinite(largest), _power_of_two(-exponent), jnp.nan))


def _power_of_two(exponent: Array) -> Array:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _dot(a: Scaled, b: Scaled, a_dims: tuple[int, ...], b_dims: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Multiply two scaled tensors, contracting the given dims, with a sum in float32; remat saves it before scaling.

    On GPUs the operands stay in 8 bits and the scales come after the product: XLA's Triton does not recognise scales
    before it. On other platforms the operands are converted to the dtype of the result, exactly.
    """
    lhs, rhs, precision = a.values, b.values, None
    if platform() != "gpu":
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    elif GRADIENT in (lhs.dtype, rhs.dtype):
        precision = jax.lax.Precision.HIGHEST  # for cuBLAS: no "fast accumulation", which keeps 14 bits of the sum
    dims = ((a_dims, b_dims), ((), ()))
    product = jax.lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=dtype)
    return product * (a.unit * b.unit).astype(dtype)


@jax.custom_vjp
def fp8_matmul(x: Array, kernel: Array) -> Array:
    """Multiply x [*N, I] @ kernel [I, O] in 8-bit floats, in the forward and in the backward pass.

    Both are float32 or bfloat16, and so are the result [*N, O] and the gradients.
    """
    return _fp8_forward(x, kernel)[0]


def _fp8_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Scaled, Scaled]]:
    a, b = quantize(x, FORWARD), quantize(kernel, FORWARD)
    with jax.named_scope("fp8_forward"):
        return _dot(a, b, (x.ndim - 1,), (0,), x.dtype), (a, b)


def _fp8_backward(saved: tuple[Scaled, Scaled], gradient: Array) -> tuple[Array, Array]:
    a, b = saved
    c = quantize(gradient, GRADIENT)
    rows = tuple(range(gradient.ndim - 1))
    with jax.named_scope("fp8_input_gradient"):
        dx = _dot(c, b, (gradient.ndim - 1,), (1,), gradient.dtype)
    with jax.named_scope("fp8_kernel_gradient"):
        return dx, _dot(a, c, rows, rows, gradient.dtype)


fp8_matmul.defvjp(_fp8_forward, _fp8_backward)


def frozen_matmul(x: Array, kernel: Any, floats: Callable[[Any], Array], scale: Array | None) -> Array:
    """Multiply x @ floats(kernel) * scale, with a gradient to x only.

    The backward pass makes the floats again from the kernel, so that a stack of layers never keeps them: between
    forward and backward there is nothing but the kernel itself.

    Args:
        x: [*N, I], any float dtype; the result [*N, O] is in that dtype, summed and scaled in float32.
        kernel: tree of arrays.
        floats: kernel -> [I, O] in the dtype of x.
        scale: float32 [O]; None: 1.
    """

    def product(x: Array, kernel: Any, scale: Array | None) -> Array:
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        if scale is None:
            return jax.lax.dot_general(x, floats(kernel), dims)
        y = jax.lax.dot_general(x, floats(kernel), dims, preferred_element_type=jnp.float32)
        return (y * scale).astype(x.dtype)

    # `product` and not `multiply`, so that a gradient can be differentiated forward.
    def forward(x: Array, kernel: Any, scale: Array | None) -> tuple[Array, Any]:
        return product(x, kernel, scale), (kernel, scale)

    def backward(kept: Any, gradient: Array) -> tuple[Array, None, None]:
        # The floats depend on the gradient here: where layers are written out instead of scanned, the compiler would
        # find those of the forward pass equal and keep them.
        gradient, (kernel, scale) = jax.lax.optimization_barrier((gradient, kept))
        dims = (((gradient.ndim - 1,), (1,)), ((), ()))
        if scale is not None:
            gradient = (gradient.astype(jnp.float32) * scale).astype(gradient.dtype)
        return jax.lax.dot_general(gradient, floats(kernel), dims), None, None

    multiply = jax.custom_vjp(product)
    multiply.defvjp(forward, backward)
    return multiply(x, kernel, scale)


def int8_matmul(x: Array, kernel: QuantizedKernel) -> Array:
    """Multiply x [*N, I] @ kernel [I, O] of 8-bit integers: [*N, O] in the dtype of x; gradients flow to x.

    The integers are converted to the dtype of x, exactly, and the product is summed in float32 and scaled.
    """
    return frozen_matmul(x, kernel.values, lambda values: values.astype(x.dtype), kernel.scale)


def nf4_matmul(x: Array, kernel: Nf4Kernel) -> Array:
    """Multiply x [*N, I] @ kernel [I, O] of 4-bit normal floats, in the dtype of x; gradients flow to x."""
    return frozen_matmul(x, kernel, partial(dequantize, dtype=x.dtype), None)
