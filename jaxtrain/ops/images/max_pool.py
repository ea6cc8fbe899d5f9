"""The max-pooling of a ResNet's stem: windows of 3x3, stride 2, padding 1; plain, and by shifted comparisons on CPU.

Shapes: B batch, H height, W width, C channels of the images; h and w: height and width of the results.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.layout.sharding import platform


def max_pool(x_BHWC: jax.Array) -> jax.Array:
    """Take the largest number of each window of 3x3, with stride 2 and padding 1.

    Where several numbers of a window are the largest, its gradient goes to the first, row by row.

    Args:
        x_BHWC: any float dtype.

    Returns:
        [B, ceil(H / 2), ceil(W / 2), C].
    """
    even = x_BHWC.shape[1] % 2 == 0 and x_BHWC.shape[2] % 2 == 0
    return _by_shifts(x_BHWC) if platform() == "cpu" and even else reference_max_pool(x_BHWC)


def reference_max_pool(x_BHWC: jax.Array) -> jax.Array:
    """Compute `max_pool` in its plain form."""
    window, strides, padding = (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
    return jax.lax.reduce_window(x_BHWC, np.array(-np.inf, x_BHWC.dtype), jax.lax.max, window, strides, padding)


def _taps(x_BHWC: jax.Array) -> list[jax.Array]:
    """The nine numbers of each window, row by row, each [B, h, w, C]."""
    height, width = x_BHWC.shape[1:3]
    padded = jnp.pad(x_BHWC, ((0, 0), (1, 0), (1, 0), (0, 0)), constant_values=-np.inf)
    return [padded[:, i : i + height : 2, j : j + width : 2] for i in range(3) for j in range(3)]


@jax.custom_vjp
def _by_shifts(x_BHWC: jax.Array) -> jax.Array:
    return functools.reduce(jnp.maximum, _taps(x_BHWC))


def _forward(x_BHWC: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    y = _by_shifts(x_BHWC)
    return y, (x_BHWC, y)


def _backward(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array]:
    x_BHWC, y_BhwC = residuals
    taken = jnp.zeros(y_BhwC.shape, bool)
    parts: list[jax.Array] = []
    for tap in _taps(x_BHWC):
        first = (tap == y_BhwC) & ~taken
        taken = taken | first
        parts.append(jnp.where(first, gradient, 0))

    def from_next(part: jax.Array, dim: int) -> jax.Array:
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


_by_shifts.defvjp(_forward, _backward)
