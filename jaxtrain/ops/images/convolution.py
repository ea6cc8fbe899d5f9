"""Convolutions without bias and with 'same' padding: the plain form, and on CPU products where those are faster.

What runs on CPU, by shape (2 cores, float32, jax 0.10.2, by processor time; docs/benchmarks.md): 1x1 convolutions are
products of the pixels by the kernel, and so are their gradients. Where the results of
larger kernels have at most 2x2 pixels, they are sums of products, one for each tap of the kernel, by the pixels that it
is over: XLA has no fast form for images smaller than the kernel (2x2 pixels, 256 channels, batch 64, both gradients
included: 199 ms), and where it has one, it multiplies the padding, which is 8/9 of the window at one pixel. Of other
3x3 convolutions of few pixels by many channels, the gradient of the images multiplies the kernel as it is stored, where
the plain form flips and transposes 9 MB of it: 2.9 x as fast for 3x3 pixels and 512 channels. All others are plain,
which is as fast as gathered patches or nine shifted products, or faster. Gradients are written in the order of dims
that the fast form takes: XLA brings others into it outside of loops only, and the blocks of a ResNet are a loop.

Shapes: B batch, H height, W width, I channels in, O channels out, N pixels of all images, K side of the kernel.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.layout.sharding import platform

# The kernel counts, and not the pixels, where there are at least so many channels per pixel of the batch.
_CHANNELS_PER_PIXEL = 1
# Results of at most so many pixels a side are sums of products, one for each tap of the kernel.
_SMALL_SIDE = 2

Residuals = tuple[jax.Array, jax.Array]


def convolve(x_BHWI: jax.Array, kernel_KKIO: jax.Array, *, stride: int) -> jax.Array:
    """Convolve images with a square kernel of odd side, padded by half of it.

    Args:
        x_BHWI: any float dtype.
        kernel_KKIO: the same dtype.
        stride: of both dims.

    Returns:
        [B, ceil(H / stride), ceil(W / stride), O].
    """
    size, _, inputs, _ = kernel_KKIO.shape
    if platform() != "cpu":
        return reference_convolve(x_BHWI, kernel_KKIO, stride)
    if size == 1:
        return _product(x_BHWI, kernel_KKIO, stride)
    if max(x_BHWI.shape[1:3]) <= _SMALL_SIDE * stride:
        return _by_taps(x_BHWI, kernel_KKIO, stride)
    pixels = math.prod(x_BHWI.shape[:3])
    if stride == 1 and inputs >= _CHANNELS_PER_PIXEL * pixels:
        return _few_pixels(x_BHWI, kernel_KKIO)
    return reference_convolve(x_BHWI, kernel_KKIO, stride) if stride > 1 else _plain(x_BHWI, kernel_KKIO)


def reference_convolve(x_BHWI: jax.Array, kernel_KKIO: jax.Array, stride: int) -> jax.Array:
    """Compute `convolve` in its plain form."""
    return _padded(x_BHWI, kernel_KKIO, (kernel_KKIO.shape[0] - 1) // 2, stride)


def _padded(x_BHWI: jax.Array, kernel_hwIO: jax.Array, pad: int, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x_BHWI,
        kernel_hwIO,
        window_strides=(stride, stride),
        padding=((pad, pad), (pad, pad)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x_BHWI: jax.Array, kernel_11IO: jax.Array, stride: int) -> jax.Array:
    x_BhwI = x_BHWI[:, ::stride, ::stride]
    y_NO = x_BhwI.reshape(-1, x_BhwI.shape[-1]) @ kernel_11IO[0, 0]
    return y_NO.reshape(*x_BhwI.shape[:3], -1)


def _product_forward(x_BHWI: jax.Array, kernel_11IO: jax.Array, stride: int) -> tuple[jax.Array, Residuals]:
    return _product(x_BHWI, kernel_11IO, stride), (x_BHWI, kernel_11IO)


def _product_backward(stride: int, residuals: Residuals, gradient_BhwO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BHWI, kernel_11IO = residuals
    inputs, outputs = kernel_11IO.shape[2:]
    gradient_NO = gradient_BhwO.reshape(-1, outputs)
    dx_BhwI = (gradient_NO @ kernel_11IO[0, 0].T).reshape(*gradient_BhwO.shape[:3], inputs)
    if stride > 1:
        sides = zip(x_BHWI.shape[1:3], dx_BhwI.shape[1:3], strict=True)
        ends = [side - 1 - (small - 1) * stride for side, small in sides]
        edges = [(0, end, stride - 1) for end in ends]
        dx_BhwI = jax.lax.pad(dx_BhwI, jnp.zeros((), dx_BhwI.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    x_IN = x_BHWI[:, ::stride, ::stride].reshape(-1, inputs).T
    # XLA would multiply by the images as they are stored, which its products on CPU read in steps of a pixel.
    x_IN = jax.lax.optimization_barrier(x_IN)
    return dx_BhwI, (x_IN @ gradient_NO)[None, None]


_product.defvjp(_product_forward, _product_backward)


def _by_taps(x_BHWI: jax.Array, kernel_KKIO: jax.Array, stride: int) -> jax.Array:
    """Add one product for each tap of the kernel, of those pixels that it is over in some window."""
    batch, *sides, inputs = x_BHWI.shape
    size, outputs = kernel_KKIO.shape[0], kernel_KKIO.shape[-1]
    rows, columns = ([_meeting(side, size, stride, tap) for tap in range(size)] for side in sides)
    # The gradient of a split is one concatenation; that of a slice per product would be a padded kernel per product.
    taps = jax.lax.split(kernel_KKIO.reshape(-1, inputs, outputs), (1,) * size**2)
    # Rounded once, as the plain form is, and not after each tap.
    summed = x_BHWI.dtype if x_BHWI.dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
    total = jnp.zeros((batch, *(-(-side // stride) for side in sides), outputs), summed)
    for (row, column), tap_1IO in zip(itertools.product(rows, columns), taps, strict=True):
        if row is None or column is None:
            continue
        x_BhWI = x_BHWI[:, row.pixels]
        height, width = x_BhWI.shape[1:3]
        x_RwI = x_BhWI.reshape(batch * height, width, inputs)[:, column.pixels]
        y_NO = jnp.matmul(x_RwI.reshape(-1, inputs), tap_1IO[0], preferred_element_type=summed)
        y_RwO = y_NO.reshape(*x_RwI.shape[:2], outputs)
        y_BhWO = jnp.pad(y_RwO, ((0, 0), column.around, (0, 0))).reshape(batch, height, -1, outputs)
        total += jnp.pad(y_BhWO, ((0, 0), row.around, (0, 0), (0, 0)))
    return total.astype(x_BHWI.dtype)


class _Meeting(NamedTuple):
    """Where a tap of the kernel is over pixels, along a dim.

    Attributes:
        pixels: the pixels that it is over.
        around: number of results before those of these pixels, and after them.
    """

    pixels: slice
    around: tuple[int, int]


def _meeting(side: int, size: int, stride: int, tap: int) -> _Meeting | None:
    """Find the pixels that a tap is over along a dim; None where it is over the padding in every window."""
    results, shift = -(-side // stride), tap - (size - 1) // 2
    over = [at for at in range(results) if 0 <= at * stride + shift < side]
    if not over:
        return None
    first, last = over[0] * stride + shift, over[-1] * stride + shift
    return _Meeting(slice(first, last + 1, stride), (over[0], results - 1 - over[-1]))


@jax.custom_vjp
def _plain(x_BHWI: jax.Array, kernel_KKIO: jax.Array) -> jax.Array:
    return reference_convolve(x_BHWI, kernel_KKIO, 1)


@jax.custom_vjp
def _few_pixels(x_BHWI: jax.Array, kernel_KKIO: jax.Array) -> jax.Array:
    return reference_convolve(x_BHWI, kernel_KKIO, 1)


def _forward(x_BHWI: jax.Array, kernel_KKIO: jax.Array) -> tuple[jax.Array, Residuals]:
    return reference_convolve(x_BHWI, kernel_KKIO, 1), (x_BHWI, kernel_KKIO)


def _plain_backward(residuals: Residuals, gradient_BHWO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BHWI, kernel_KKIO = residuals
    dx_BHWI = reference_convolve(gradient_BHWO, kernel_KKIO[::-1, ::-1].swapaxes(2, 3), 1)
    return dx_BHWI, _kernel_gradient(x_BHWI, gradient_BHWO, kernel_KKIO.shape[0])


def _few_pixels_backward(residuals: Residuals, gradient_BHWO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BHWI, kernel_KKIO = residuals
    size, _, inputs, outputs = kernel_KKIO.shape
    pad = (size - 1) // 2
    gradient_ON = gradient_BHWO.reshape(-1, outputs).T
    taps = (kernel_KKIO.reshape(-1, outputs) @ gradient_ON).reshape(size, size, inputs, *x_BHWI.shape[:3])

    def shifted(row: int, column: int) -> jax.Array:
        down, right = row - pad, column - pad
        edges = ((0, 0, 0), (0, 0, 0), (down, -down, 0), (right, -right, 0))
        return jax.lax.pad(taps[row, column], jnp.zeros((), taps.dtype), edges)

    dx_IBHW = functools.reduce(jnp.add, (shifted(row, column) for row in range(size) for column in range(size)))
    return dx_IBHW.transpose(1, 2, 3, 0), _kernel_gradient(x_BHWI, gradient_BHWO, size)


def _kernel_gradient(x_BHWI: jax.Array, gradient_BHWO: jax.Array, size: int) -> jax.Array:
    """Convolve the images with the gradient: the channels in are the images, and the images are the channels."""
    gradient_IKKO = _padded(x_BHWI.transpose(3, 1, 2, 0), gradient_BHWO.transpose(1, 2, 0, 3), (size - 1) // 2)
    return gradient_IKKO.transpose(1, 2, 0, 3)


_plain.defvjp(_forward, _plain_backward)
_few_pixels.defvjp(_forward, _few_pixels_backward)
