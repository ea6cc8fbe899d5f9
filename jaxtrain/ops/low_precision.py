"""Matmuls of 8-bit floats in training, and with frozen kernels of int8 or nf4.

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

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxtrain.layout.sharding import platform
from jaxtrain.precision.kernels import QuantizedKernel, round_to_int8
from jaxtrain.precision.nf4 import Nf4Kernel, dequantize

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
    """Multiply two scaled tensors, contracting the given dims, with a sum in float32.

    On GPUs the operands stay in 8 bits and the scales are applied after the product: XLA then uses a native product
    whether it chooses cuBLAS or Triton, while scales before the product are recognised by its cuBLAS pass alone. On
    other platforms the operands are converted to the dtype of the result, exactly. The product before scaling is what
    remat policies save.
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

    # `product` and not `multiply`, so that a gradient can be differentiated forward (the curvature that Sophia takes).
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
    """Multiply x [*N, I] @ kernel [I, O] of 8-bit integers: [*N, O] in the dtype of x.

    Without `kernel.activations` the integers are converted to the dtype of x, exactly, and the product is summed in
    float32 and scaled; gradients flow to x. With `kernel.activations` each row of x is rounded to int8, scaled by its
    own largest magnitude, and the integers are multiplied and summed exactly; this has no gradient.
    """
    if not kernel.activations:
        dtype = x.dtype
        return frozen_matmul(x, kernel.values, lambda values: values.astype(dtype), kernel.scale)
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    rows, unit = round_to_int8(x, (x.ndim - 1,))

    # Exact for up to 133,144 inputs, in an int32.
    total = jax.lax.dot_general(rows, kernel.values, dims, preferred_element_type=jnp.int32).astype(jnp.float32)
    return (total * unit * kernel.scale).astype(x.dtype)


def nf4_matmul(x: Array, kernel: Nf4Kernel) -> Array:
    """Multiply x [*N, I] @ kernel [I, O] of 4-bit normal floats, in the dtype of x; gradients flow to x."""
    return frozen_matmul(x, kernel, partial(dequantize, dtype=x.dtype), None)
