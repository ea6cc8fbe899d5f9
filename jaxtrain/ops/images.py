"""Convolutions, max-pooling and batch norm of images in NHWC: plain forms, and faster ones for CPU.

What runs on CPU, by shape (2 cores, float32, jax 0.10.2, by processor time; docs/benchmarks.md):

- 1x1 convolutions are products of the pixels by the kernel, and so are their gradients.
- Where the results of larger kernels have at most 2x2 pixels, they are sums of products, one per tap of the kernel,
  by the pixels that it is over: XLA has no fast form for images smaller than the kernel, and multiplies the padding.
- Of other 3x3 convolutions of few pixels by many channels, the gradient of the images multiplies the kernel as it is
  stored, where the plain form flips and transposes it: 2.9 x as fast for 3x3 pixels and 512 channels.
- All others are plain. Gradients are written in the order of dims that the fast form takes: XLA brings others into it
  outside of loops only, and the blocks of a ResNet are a loop.
- The sums of a batch norm over rows are products with a row of ones: 0.2 ms in place of 3.6 for [8, 24, 24, 256].
- Norm, ReLU and convolution are one operation, whose backward pass keeps the input of the norm alone.

Shapes: B batch, H height, W width, h and w those of the results, C channels, I channels in, O channels out, N pixels of
all images, K side of the kernel.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxtrain.layout.sharding import platform
from jaxtrain.ops.elementwise import aligned

# The kernel counts, and not the pixels, where there are at least so many channels per pixel of the batch.
_CHANNELS_PER_PIXEL = 1
# Results of at most so many pixels a side are sums of products, one for each tap of the kernel.
_SMALL_SIDE = 2
# The height is added up in at most so many slices before the product, by which it reads fewer numbers.
_MAX_SLICES = 8
_EPSILON = 1e-5

# Of a convolution: its arguments. Of a norm: its input, the mean, the variance and the scale.
_Arguments = tuple[Array, Array]
_Normed = tuple[Array, Array, Array, Array]
# What a norm, with a convolution or without, makes: the outputs, and the mean and variance of each channel.
_Outputs = tuple[Array, Array, Array]


def convolve(x_BHWI: Array, kernel_KKIO: Array, *, stride: int) -> Array:
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
    if stride > 1:
        return reference_convolve(x_BHWI, kernel_KKIO, stride)
    return _unstrided(x_BHWI, kernel_KKIO, inputs >= _CHANNELS_PER_PIXEL * math.prod(x_BHWI.shape[:3]))


def reference_convolve(x_BHWI: Array, kernel_KKIO: Array, stride: int) -> Array:
    """Compute `convolve` in its plain form."""
    return _padded(x_BHWI, kernel_KKIO, (kernel_KKIO.shape[0] - 1) // 2, stride)


def _padded(x_BHWI: Array, kernel_hwIO: Array, pad: int, stride: int = 1) -> Array:
    return jax.lax.conv_general_dilated(
        x_BHWI,
        kernel_hwIO,
        window_strides=(stride, stride),
        padding=((pad, pad), (pad, pad)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x_BHWI: Array, kernel_11IO: Array, stride: int) -> Array:
    x_BhwI = x_BHWI[:, ::stride, ::stride]
    y_NO = x_BhwI.reshape(-1, x_BhwI.shape[-1]) @ kernel_11IO[0, 0]
    return y_NO.reshape(*x_BhwI.shape[:3], -1)


def _product_forward(x_BHWI: Array, kernel_11IO: Array, stride: int) -> tuple[Array, _Arguments]:
    return _product(x_BHWI, kernel_11IO, stride), (x_BHWI, kernel_11IO)


def _product_backward(stride: int, residuals: _Arguments, gradient_BhwO: Array) -> tuple[Array, Array]:
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


def _by_taps(x_BHWI: Array, kernel_KKIO: Array, stride: int) -> Array:
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
        x_BhWI = x_BHWI[:, row[0]]
        height, width = x_BhWI.shape[1:3]
        x_RwI = x_BhWI.reshape(batch * height, width, inputs)[:, column[0]]
        y_NO = jnp.matmul(x_RwI.reshape(-1, inputs), tap_1IO[0], preferred_element_type=summed)
        y_RwO = y_NO.reshape(*x_RwI.shape[:2], outputs)
        y_BhWO = jnp.pad(y_RwO, ((0, 0), column[1], (0, 0))).reshape(batch, height, -1, outputs)
        total += jnp.pad(y_BhWO, ((0, 0), row[1], (0, 0), (0, 0)))
    return total.astype(x_BHWI.dtype)


def _meeting(side: int, size: int, stride: int, tap: int) -> tuple[slice, tuple[int, int]] | None:
    """Find the pixels that a tap is over along a dim, and the number of results before and after those of these pixels.

    None where it is over the padding in every window.
    """
    results, shift = -(-side // stride), tap - (size - 1) // 2
    over = [at for at in range(results) if 0 <= at * stride + shift < side]
    if not over:
        return None
    first, last = over[0] * stride + shift, over[-1] * stride + shift
    return slice(first, last + 1, stride), (over[0], results - 1 - over[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _unstrided(x_BHWI: Array, kernel_KKIO: Array, few_pixels: bool) -> Array:
    return reference_convolve(x_BHWI, kernel_KKIO, 1)


def _unstrided_forward(x_BHWI: Array, kernel_KKIO: Array, few_pixels: bool) -> tuple[Array, _Arguments]:
    return reference_convolve(x_BHWI, kernel_KKIO, 1), (x_BHWI, kernel_KKIO)


def _unstrided_backward(few_pixels: bool, residuals: _Arguments, gradient_BHWO: Array) -> tuple[Array, Array]:
    x_BHWI, kernel_KKIO = residuals
    if few_pixels:
        dx_BHWI = _few_pixels_gradient(x_BHWI, kernel_KKIO, gradient_BHWO)
    else:
        dx_BHWI = reference_convolve(gradient_BHWO, kernel_KKIO[::-1, ::-1].swapaxes(2, 3), 1)
    return dx_BHWI, _kernel_gradient(x_BHWI, gradient_BHWO, kernel_KKIO.shape[0])


def _few_pixels_gradient(x_BHWI: Array, kernel_KKIO: Array, gradient_BHWO: Array) -> Array:
    """Multiply the kernel as it is stored by the gradient, and add up the results where each tap is."""
    size, _, inputs, outputs = kernel_KKIO.shape
    pad = (size - 1) // 2
    gradient_ON = gradient_BHWO.reshape(-1, outputs).T
    taps = (kernel_KKIO.reshape(-1, outputs) @ gradient_ON).reshape(size, size, inputs, *x_BHWI.shape[:3])

    def shifted(row: int, column: int) -> Array:
        down, right = row - pad, column - pad
        edges = ((0, 0, 0), (0, 0, 0), (down, -down, 0), (right, -right, 0))
        return jax.lax.pad(taps[row, column], jnp.zeros((), taps.dtype), edges)

    dx_IBHW = functools.reduce(jnp.add, (shifted(row, column) for row in range(size) for column in range(size)))
    return dx_IBHW.transpose(1, 2, 3, 0)


def _kernel_gradient(x_BHWI: Array, gradient_BHWO: Array, size: int) -> Array:
    """Convolve the images with the gradient: the channels in are the images, and the images are the channels."""
    gradient_IKKO = _padded(x_BHWI.transpose(3, 1, 2, 0), gradient_BHWO.transpose(1, 2, 0, 3), (size - 1) // 2)
    return gradient_IKKO.transpose(1, 2, 0, 3)


_unstrided.defvjp(_unstrided_forward, _unstrided_backward)


def max_pool(x_BHWC: Array) -> Array:
    """Take the largest number of each window of 3x3, with stride 2 and padding 1: [B, ceil(H / 2), ceil(W / 2), C].

    Where several numbers of a window are the largest, its gradient goes to the first, row by row.
    """
    even = x_BHWC.shape[1] % 2 == 0 and x_BHWC.shape[2] % 2 == 0
    return _pool(x_BHWC) if platform() == "cpu" and even else reference_max_pool(x_BHWC)


def reference_max_pool(x_BHWC: Array) -> Array:
    """Compute `max_pool` in its plain form."""
    window, strides, padding = (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
    return jax.lax.reduce_window(x_BHWC, np.array(-np.inf, x_BHWC.dtype), jax.lax.max, window, strides, padding)


def _window(x_BHWC: Array) -> list[Array]:
    """The nine numbers of each window, row by row, each [B, h, w, C]."""
    height, width = x_BHWC.shape[1:3]
    padded = jnp.pad(x_BHWC, ((0, 0), (1, 0), (1, 0), (0, 0)), constant_values=-np.inf)
    return [padded[:, i : i + height : 2, j : j + width : 2] for i in range(3) for j in range(3)]


@jax.custom_vjp
def _pool(x_BHWC: Array) -> Array:
    return functools.reduce(jnp.maximum, _window(x_BHWC))


def _pool_forward(x_BHWC: Array) -> tuple[Array, tuple[Array, Array]]:
    y = _pool(x_BHWC)
    return y, (x_BHWC, y)


def _pool_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array]:
    x_BHWC, y_BhwC = residuals
    taken = jnp.zeros(y_BhwC.shape, bool)
    parts: list[Array] = []
    for tap in _window(x_BHWC):
        first = (tap == y_BhwC) & ~taken
        taken = taken | first
        parts.append(jnp.where(first, gradient, 0))

    def from_next(part: Array, dim: int) -> Array:
        """The part of the window after each one along a dim."""
        low = tuple(int(d == dim) for d in range(4))
        padded = jnp.pad(part, [(0, one) for one in low])
        return jax.lax.slice(padded, low, tuple(a + b for a, b in zip(low, part.shape, strict=True)))

    # A pixel in an even row is in the middle row of one window; one in an odd row is in the last row of one window and
    # in the first row of the next. Columns likewise.
    rows = [
        [parts[3 + j] for j in range(3)],
        [parts[6 + j] + from_next(parts[j], 1) for j in range(3)],
    ]
    pixels = [jnp.stack([row[1], row[2] + from_next(row[0], 2)], axis=3) for row in rows]
    return (jnp.stack(pixels, axis=2).reshape(x_BHWC.shape),)


_pool.defvjp(_pool_forward, _pool_backward)


def batch_norm(x_BHWC: Array, scale_C: Array, bias_C: Array) -> _Outputs:
    """Normalise each channel by its mean and variance over the batch, in float32.

    Args:
        x_BHWC: any float dtype.
        scale_C, bias_C: float32.

    Returns:
        The outputs in the dtype of x, and the mean and the (biased) variance of each channel, float32 [C].
    """
    if platform() == "cpu":
        return _norm(x_BHWC, scale_C, bias_C)
    return reference_batch_norm(x_BHWC, scale_C, bias_C)


def reference_batch_norm(x_BHWC: Array, scale_C: Array, bias_C: Array) -> _Outputs:
    """Compute `batch_norm` in its plain form."""
    x = x_BHWC.astype(jnp.float32)
    mean = jnp.mean(x, axis=(0, 1, 2))
    variance = jnp.mean(jnp.square(x - aligned(mean, x)), axis=(0, 1, 2))
    return normalise(x_BHWC, mean, variance, scale_C, bias_C), mean, variance


def normalise(x_BHWC: Array, mean_C: Array, variance_C: Array, scale_C: Array, bias_C: Array) -> Array:
    """Normalise each channel by a given mean and variance; float32 inside, the dtype of x outside."""
    scale = scale_C * jax.lax.rsqrt(variance_C + _EPSILON)
    y = (x_BHWC.astype(jnp.float32) - aligned(mean_C, x_BHWC)) * aligned(scale, x_BHWC) + aligned(bias_C, x_BHWC)
    return y.astype(x_BHWC.dtype)


def channel_sums(x_BHWC: Array) -> Array:
    """Sum over all dims but the last, float32 [C]: slices of the height first, then a product with ones.

    The batch is not sliced, because it may be sharded.
    """
    height = x_BHWC.shape[1]
    slices = max(count for count in range(1, _MAX_SLICES + 1) if height % count == 0)
    part = height // slices
    total = functools.reduce(jnp.add, (x_BHWC[:, i * part : (i + 1) * part] for i in range(slices)))
    rows_NC = total.reshape(-1, total.shape[-1])
    return (jnp.ones((1, rows_NC.shape[0]), rows_NC.dtype) @ rows_NC)[0]


@jax.custom_vjp
def _norm(x_BHWC: Array, scale_C: Array, bias_C: Array) -> _Outputs:
    return _norm_forward(x_BHWC, scale_C, bias_C)[0]


def _norm_forward(x_BHWC: Array, scale_C: Array, bias_C: Array) -> tuple[_Outputs, _Normed]:
    x = x_BHWC.astype(jnp.float32)
    count = x.size // x.shape[-1]
    mean = channel_sums(x) / count
    variance = channel_sums(jnp.square(x - aligned(mean, x))) / count
    # The backward pass keeps x, which is the result of a convolution, and nothing else of its size.
    return (normalise(x_BHWC, mean, variance, scale_C, bias_C), mean, variance), (x_BHWC, mean, variance, scale_C)


def batch_norm_gradients(residuals: _Normed, gradients: _Outputs) -> _Outputs:
    """Return the gradients of x, scale and bias: from x, mean, variance and scale, and the gradients of the outputs."""
    x_BHWC, mean, variance, scale_C = residuals
    dy, dmean, dvariance = gradients[0].astype(jnp.float32), gradients[1], gradients[2]
    inverse = jax.lax.rsqrt(variance + _EPSILON)
    normal = (x_BHWC.astype(jnp.float32) - aligned(mean, dy)) * aligned(inverse, dy)
    count = dy.size // dy.shape[-1]
    dbias, dscale = channel_sums(dy), channel_sums(dy * normal)
    # What the mean and the variance pass on is gathered per channel, so that only three terms have the size of x.
    factor = scale_C * inverse
    offset = (dmean - factor * dbias) / count
    slope = (factor * dscale - 2 * dvariance / inverse) / count
    dx = aligned(factor, dy) * dy + aligned(offset, dy) - normal * aligned(slope, dy)
    return dx.astype(x_BHWC.dtype), dscale, dbias


_norm.defvjp(_norm_forward, batch_norm_gradients)


def normalise_and_convolve(
    x_BHWI: Array, scale_I: Array, bias_I: Array, kernel_KKIO: Array, *, stride: int
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
    return _norm_and_convolve(x_BHWI, scale_I, bias_I, kernel_KKIO, stride)


def _norm_and_convolve(x_BHWI: Array, scale_I: Array, bias_I: Array, kernel_KKIO: Array, stride: int) -> _Outputs:
    """Compute `normalise_and_convolve` in its plain form."""
    y_BHWI, mean, variance = batch_norm(x_BHWI, scale_I, bias_I)
    return convolve(jax.nn.relu(y_BHWI), kernel_KKIO, stride=stride), mean, variance


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _keeping_input(x_BHWI: Array, scale_I: Array, bias_I: Array, kernel_KKIO: Array, stride: int) -> _Outputs:
    return _norm_and_convolve(x_BHWI, scale_I, bias_I, kernel_KKIO, stride)


def _keeping_forward(
    x_BHWI: Array, scale_I: Array, bias_I: Array, kernel_KKIO: Array, stride: int
) -> tuple[_Outputs, tuple[Array, ...]]:
    z_BhwO, mean, variance = _norm_and_convolve(x_BHWI, scale_I, bias_I, kernel_KKIO, stride)
    return (z_BhwO, mean, variance), (x_BHWI, mean, variance, scale_I, bias_I, kernel_KKIO)


def _keeping_backward(
    stride: int, residuals: tuple[Array, ...], gradients: _Outputs
) -> tuple[Array, Array, Array, Array]:
    x_BHWI, mean, variance, scale_I, bias_I, kernel_KKIO = residuals
    dz_BhwO, dmean, dvariance = gradients
    # Without the barrier XLA would find the results of the forward pass, and keep them.
    x_BHWI = jax.lax.optimization_barrier(x_BHWI)
    y_BHWI = normalise(x_BHWI, mean, variance, scale_I, bias_I)
    # The convolution itself is not used, and is no part of the program.

    def convolution(y_BHWI: Array, kernel_KKIO: Array) -> Array:
        return convolve(y_BHWI, kernel_KKIO, stride=stride)

    dy_BHWI, dkernel_KKIO = jax.vjp(convolution, jax.nn.relu(y_BHWI), kernel_KKIO)[1](dz_BhwO)
    dy_BHWI = jax.lax.select(y_BHWI > 0, dy_BHWI, jnp.zeros_like(dy_BHWI))
    dx, dscale, dbias = batch_norm_gradients((x_BHWI, mean, variance, scale_I), (dy_BHWI, dmean, dvariance))
    return dx, dscale, dbias, dkernel_KKIO


_keeping_input.defvjp(_keeping_forward, _keeping_backward)
