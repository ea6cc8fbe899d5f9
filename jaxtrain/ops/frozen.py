"""Products with a frozen kernel that is stored in fewer bits and turned into floats where it is used.

Shapes: N rows (one dim or several), I input features, O output features.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def frozen_matmul(x: jax.Array, kernel: Any, floats: Callable[[Any], jax.Array], scale: jax.Array | None) -> jax.Array:
    """Multiply x @ floats(kernel) * scale, with a gradient to x only.

    The backward pass makes the floats again from the kernel, so that a stack of layers never keeps them: between
    forward and backward there is nothing but the kernel itself.

    Args:
        x: [*N, I], any float dtype.
        kernel: tree of arrays.
        floats: kernel -> [I, O] in the dtype of x.
        scale: float32 [O]; None: 1.

    Returns:
        [*N, O] in the dtype of x; summed, and scaled, in float32.
    """

    def product(x: jax.Array, kernel: Any, scale: jax.Array | None) -> jax.Array:
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        if scale is None:
            return jax.lax.dot_general(x, floats(kernel), dims)
        y = jax.lax.dot_general(x, floats(kernel), dims, preferred_element_type=jnp.float32)
        return (y * scale).astype(x.dtype)

    # `product` and not `multiply`, so that a gradient can be differentiated forward (the curvature that Sophia takes).
    def forward(x: jax.Array, kernel: Any, scale: jax.Array | None) -> tuple[jax.Array, Any]:
        return product(x, kernel, scale), (kernel, scale)

    def backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, None, None]:
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
