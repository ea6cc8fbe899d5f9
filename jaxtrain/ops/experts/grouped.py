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
from jaxtrain.ops.experts.blocks import block_gradients, block_products
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
    by_tiles = where == "gpu" and triton.refusal(rows_RI.shape[0], *kernels_EIO.shape[1:]) is None
    return multiply_groups(TILED if by_tiles else BLOCKED, rows_RI, kernels_EIO, group_sizes_E)


@dataclass(frozen=True)
class Form:
    """A way to multiply groups of rows.

    Attributes:
        products: (rows [R, I], kernels [E, I, O], group sizes) -> [R, O].
        gradients: (rows [R, I], kernels, gradients [R, O], group sizes) -> gradients of the rows [R, I], and of the
            kernels, float32 [E, I, O].
    """

    products: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    gradients: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def _block(rows: jax.Array, group_sizes_E: jax.Array) -> int:
    return block_rows("cpu", rows.shape[0], group_sizes_E.size)


def tiled(*, interpret: bool = False) -> Form:
    """The form of the kernels for NVIDIA.

    Args:
        interpret: whether their steps run as plain operations, on any platform; for tests.
    """

    def gradients(
        rows: jax.Array, kernels: jax.Array, gradient: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        of_rows = triton.tile_products(gradient, kernels, sizes, transposed=True, interpret=interpret)
        return of_rows, triton.tile_kernel_gradients(rows, gradient, sizes, interpret=interpret)

    return Form(partial(triton.tile_products, interpret=interpret), gradients)


BLOCKED = Form(
    lambda rows, kernels, sizes: block_products(rows, kernels, sizes, block=_block(rows, sizes)),
    lambda rows, kernels, gradient, sizes: block_gradients(rows, kernels, gradient, sizes, block=_block(rows, sizes)),
)
TILED = tiled()


def multiply_groups(form: Form, rows_RI: jax.Array, kernels_EIO: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """`grouped_matmul` in a form, with the gradients of that form."""
    return _multiply(form, *vary_alike(rows_RI, kernels_EIO, group_sizes_E))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(form: Form, rows_RI: jax.Array, kernels_EIO: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    return form.products(rows_RI, kernels_EIO, group_sizes_E)


def _multiply_forward(
    form: Form, rows_RI: jax.Array, kernels_EIO: jax.Array, group_sizes_E: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return form.products(rows_RI, kernels_EIO, group_sizes_E), (rows_RI, kernels_EIO, group_sizes_E)


def _multiply_backward(
    form: Form, saved: tuple[jax.Array, jax.Array, jax.Array], gradient_RO: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows_RI, kernels_EIO, group_sizes_E = saved
    rows_gradient, kernels_gradient = form.gradients(rows_RI, kernels_EIO, gradient_RO, group_sizes_E)
    return rows_gradient, kernels_gradient.astype(kernels_EIO.dtype), None


_multiply.defvjp(_multiply_forward, _multiply_backward)
