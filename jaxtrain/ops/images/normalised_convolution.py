"""Batch norm, ReLU and a convolution as one operation, whose backward pass on CPU keeps the input of the norm alone.

What a convolution multiplies is there twice otherwise: as the result of the convolution before, which the norm's
gradient takes, and normalised. In a loop over blocks each is written into a stack, which XLA fills with zeros and
copies first. Normalising again fuses with the transposition that the gradient of the kernel makes of it anyway.

Shapes: B batch, H height, W width, h and w those of the results, I channels in, O channels out, K side of the kernel.
"""

import functools

import jax
import jax.numpy as jnp

from jaxtrain.layout.sharding import platform
from jaxtrain.ops.images.batch_norm import batch_norm, batch_norm_gradients, normalise
from jaxtrain.ops.images.convolution import convolve

_Outputs = tuple[jax.Array, jax.Array, jax.Array]
_Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def normalise_and_convolve(
    x_BHWI: jax.Array, scale_I: jax.Array, bias_I: jax.Array, kernel_KKIO: jax.Array, *, stride: int
) -> _Outputs:
    """Normalise images by the statistics of the batch, set negative numbers to zero, and convolve.

    Args:
        x_BHWI: any float dtype.
        scale_I, bias_I: float32, as `batch_norm` takes them.
        kernel_KKIO: the dtype of x, as `convolve` takes it.
        stride: of both dims.

    Returns:
        The convolution [B, h, w, O] in the dtype of x, and the mean and the (biased) variance of each channel of x,
        float32 [I].
    """
    if platform() == "cpu":
        return _keeping_input(x_BHWI, scale_I, bias_I, kernel_KKIO, stride)
    return reference_normalise_and_convolve(x_BHWI, scale_I, bias_I, kernel_KKIO, stride)


def reference_normalise_and_convolve(
    x_BHWI: jax.Array, scale_I: jax.Array, bias_I: jax.Array, kernel_KKIO: jax.Array, stride: int
) -> _Outputs:
    """Compute `normalise_and_convolve` in its plain form."""
    y_BHWI, mean, variance = batch_norm(x_BHWI, scale_I, bias_I)
    return convolve(jax.nn.relu(y_BHWI), kernel_KKIO, stride=stride), mean, variance


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _keeping_input(
    x_BHWI: jax.Array, scale_I: jax.Array, bias_I: jax.Array, kernel_KKIO: jax.Array, stride: int
) -> _Outputs:
    return reference_normalise_and_convolve(x_BHWI, scale_I, bias_I, kernel_KKIO, stride)


def _forward(
    x_BHWI: jax.Array, scale_I: jax.Array, bias_I: jax.Array, kernel_KKIO: jax.Array, stride: int
) -> tuple[_Outputs, _Residuals]:
    z_BhwO, mean, variance = reference_normalise_and_convolve(x_BHWI, scale_I, bias_I, kernel_KKIO, stride)
    return (z_BhwO, mean, variance), (x_BHWI, mean, variance, scale_I, bias_I, kernel_KKIO)


def _backward(
    stride: int, residuals: _Residuals, gradients: _Outputs
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    x_BHWI, mean, variance, scale_I, bias_I, kernel_KKIO = residuals
    dz_BhwO, dmean, dvariance = gradients
    # Without the barrier XLA would find the results of the forward pass, and keep them.
    x_BHWI = jax.lax.optimization_barrier(x_BHWI)
    y_BHWI = normalise(x_BHWI, mean, variance, scale_I, bias_I)
    # The convolution itself is not used, and is no part of the program.

    def convolution(y_BHWI: jax.Array, kernel_KKIO: jax.Array) -> jax.Array:
        return convolve(y_BHWI, kernel_KKIO, stride=stride)

    dy_BHWI, dkernel_KKIO = jax.vjp(convolution, jax.nn.relu(y_BHWI), kernel_KKIO)[1](dz_BhwO)
    dy_BHWI = jax.lax.select(y_BHWI > 0, dy_BHWI, jnp.zeros_like(dy_BHWI))
    dx, dscale, dbias = batch_norm_gradients((x_BHWI, mean, variance, scale_I), (dy_BHWI, dmean, dvariance))
    return dx, dscale, dbias, dkernel_KKIO


_keeping_input.defvjp(_forward, _backward)
