"""A matmul of 8-bit floats: e4m3 forward, e5m2 for gradients, and one scale per tensor, chosen from the tensor itself.

    y = x w        x and w rounded to float8_e4m3fn
    dx = dy w^T    dy rounded to float8_e5m2, w to float8_e4m3fn
    dw = x^T dy    x rounded to float8_e4m3fn, dy to float8_e5m2

Formats and scaling: Micikevicius et al. 2022, sections 3 and 4. The scale follows from the tensor's own largest
magnitude ("current" scaling), so that there is no history to keep and no step whose scale is out of date.

Scales are powers of two. A scale then commutes with every rounding of the product, so that it does not matter whether
a backend applies it before the product or after: hardware units and their emulation give the same numbers except for
the order (and, on Hopper, the width) of the sum. It does not matter either which scale a shard chooses, except for
values so small, compared with the largest, that they round to subnormals.

Shapes: N rows (one dim or several), I input features, O output features.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxtrain.layout.sharding import platform

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

    Attributes:
        values: `FORWARD` or `GRADIENT`, in the shape of the tensor.
        unit: a power of two, float32 []; NaN where the tensor held an infinity or NaN.
    """

    values: jax.Array
    unit: jax.Array


def quantize(x: jax.Array, dtype: DTypeLike) -> Scaled:
    """Round a tensor to an 8-bit format, scaled by the largest power of two that keeps it in range.

    Values saturate and never overflow. An infinity or NaN anywhere makes the unit NaN, so that it reaches the result
    and the step can skip its update.

    Args:
        x: float32 or bfloat16, of any shape. The largest magnitude of a sharded tensor is taken over all shards,
            except over mesh axes that are manual in the code being traced.
        dtype: `FORWARD` or `GRADIENT`.

    Returns:
        The rounded values and their unit.
    """
    largest = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    above = ((bits & 0x7FFFFF) > _TOP_MANTISSA).astype(jnp.int32)
    exponent = _TOP_EXPONENT[jnp.dtype(dtype)] - ((bits >> 23) - 127) - above
    exponent = jnp.minimum(exponent, _MOST_EXPONENT)  # at least -121, a normal float32 as its inverse is
    limit = float(jnp.finfo(dtype).max)
    values = jnp.clip(x.astype(jnp.float32) * _power_of_two(exponent), -limit, limit).astype(dtype)
    return Scaled(values, jnp.where(jnp.isfinite(largest), _power_of_two(-exponent), jnp.nan))


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _dot(a: Scaled, b: Scaled, a_dims: tuple[int, ...], b_dims: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Multiply two scaled tensors, contracting the given dims, with a sum in float32.

    On GPUs the operands stay in 8 bits and the scales are applied after the product: XLA then uses a native product
    whether it chooses cuBLAS or Triton, while scales before the product (`convert(a) * scale`) are recognised by its
    cuBLAS pass alone. For older GPUs XLA inserts the conversion. On other platforms the operands are converted to the
    dtype of the result, exactly. The product is rounded before it is scaled, which gives the same numbers for powers of
    two; the product before scaling is what remat policies save.
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
def fp8_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply x @ kernel in 8-bit floats, in the forward and in the backward pass.

    Args:
        x: [*N, I], float32 or bfloat16.
        kernel: [I, O], the same dtype.

    Returns:
        [*N, O] in the dtype of x; gradients are in that dtype too.
    """
    return _forward(x, kernel)[0]


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[Scaled, Scaled]]:
    a, b = quantize(x, FORWARD), quantize(kernel, FORWARD)
    with jax.named_scope("fp8_forward"):
        return _dot(a, b, (x.ndim - 1,), (0,), x.dtype), (a, b)


def _backward(saved: tuple[Scaled, Scaled], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = saved
    c = quantize(gradient, GRADIENT)
    rows = tuple(range(gradient.ndim - 1))
    with jax.named_scope("fp8_input_gradient"):
        dx = _dot(c, b, (gradient.ndim - 1,), (1,), gradient.dtype)
    with jax.named_scope("fp8_kernel_gradient"):
        return dx, _dot(a, c, rows, rows, gradient.dtype)


fp8_matmul.defvjp(_forward, _backward)
