"""Grouped matmul: rows sorted by expert, each times the kernel of its expert, in the form of the platform.

Shapes: R rows, I input and O output features, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax

from jaxtrain.layout.manual import vary_alike
from jaxtrain.layout.sharding import platform
from jaxtrain.ops.experts import triton
from jaxtrain.ops.experts.blocks import block_kernel_gradients, block_products
from jaxtrain.ops.experts.rows import block_rows


def grouped_matmul(rows_RI: jax.Array, kernels_EIO: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """Multiply each row with the kernel of its expert.

    TPU has kernels behind `jax.lax.ragged_dot`. Elsewhere that multiplies every row with every kernel and masks (jax
    0.10.2, CPU and compiled for H100), so that rows are multiplied by blocks.

    Args:
        rows_RI: sorted by expert.
        kernels_EIO: in the dtype of the rows.
        group_sizes_E: int32, rows of each expert; the sum may be below R.

    Returns:
        [R, O] in the dtype of the rows. Rows beyond the groups may hold anything, and so may their gradients.
    """
    where = platform()
    if where == "tpu":
        return jax.lax.ragged_dot(rows_RI, kernels_EIO, group_sizes_E)
    tiled = where == "gpu" and triton.refusal(rows_RI.shape[0], *kernels_EIO.shape[1:]) is None
    return multiply_groups(TILED if tiled else BLOCKED, rows_RI, kernels_EIO, group_sizes_E)


@dataclass(frozen=True)
class Form:
    """A way to multiply groups of rows.

    Attributes:
        products: (rows [R, I], kernels, group sizes, whether kernels are transposed) -> [R, O].
        kernel_gradients: (rows [R, I], gradients [R, O], group sizes) -> float32 [E, I, O].
    """

    products: Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]
    kernel_gradients: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _block(rows: jax.Array, group_sizes_E: jax.Array) -> int:
    return block_rows("cpu", rows.shape[0], group_sizes_E.size)


BLOCKED = Form(
    lambda rows, kernels, sizes, transposed: block_products(
        rows, kernels, sizes, block=_block(rows, sizes), transposed=transposed
    ),
    lambda rows, gradient, sizes: block_kernel_gradients(rows, gradient, sizes, block=_block(rows, sizes)),
)
TILED = Form(
    lambda rows, kernels, sizes, transposed: triton.tile_products(rows, kernels, sizes, transposed=transposed),
    lambda rows, gradient, sizes: triton.tile_kernel_gradients(rows, gradient, sizes),
)


def multiply_groups(form: Form, rows_RI: jax.Array, kernels_EIO: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """`grouped_matmul` in a form, with the gradients of that form."""
    return _multiply(form, *vary_alike(rows_RI, kernels_EIO, group_sizes_E))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(form: Form, rows_RI: jax.Array, kernels_EIO: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    return form.products(rows_RI, kernels_EIO, group_sizes_E, False)


def _multiply_forward(
    form: Form, rows_RI: jax.Array, kernels_EIO: jax.Array, group_sizes_E: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return form.products(rows_RI, kernels_EIO, group_sizes_E, False), (rows_RI, kernels_EIO, group_sizes_E)


def _multiply_backward(
    form: Form, saved: tuple[jax.Array, jax.Array, jax.Array], gradient_RO: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows_RI, kernels_EIO, group_sizes_E = saved
    rows_gradient = form.products(gradient_RO, kernels_EIO, group_sizes_E, True)
    kernels_gradient = form.kernel_gradients(rows_RI, gradient_RO, group_sizes_E)
    return rows_gradient, kernels_gradient.astype(kernels_EIO.dtype), None


_multiply.defvjp(_multiply_forward, _multiply_backward)
