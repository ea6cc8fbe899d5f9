"""The product of an output layer, whose gradient goes to the sum over microbatches block by block.

Shapes: B batch, L length, N tokens, D embed, V vocabulary, C ids of a block. A kernel is [D, V], or tied [V, D].
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.layout.rules import num_pieces
from jaxtrain.layout.scatter import Factors, SumOfUse, find_sum, sum_and_scatter, use_and_add
from jaxtrain.ops.linear import linear


def output_product(hidden_BLD: jax.Array, kernel: jax.Array, bias_V: jax.Array | None, *, tied: bool) -> jax.Array:
    """Compute the logits [B, L, V] of an output layer.

    Where the step sums gradients over microbatches under ZeRO, that of the kernel, which is as large as the embedding,
    is made for some ids of the vocabulary at a time, summed over `data` (ZeRO-2) and added to its sum.
    """

    def product(arguments: Any) -> jax.Array:
        hidden_BLD, kernel, bias_V = arguments
        return linear(hidden_BLD, kernel.T if tied else kernel, bias_V)

    found = find_sum(kernel)
    if found is None or found.dim not in (None, 1 if tied else 0):
        return product((hidden_BLD, kernel, bias_V))

    def pull(arguments: Any, d_logits_BLV: jax.Array, total: jax.Array, factors: Factors) -> tuple[Any, jax.Array]:
        hidden_BLD, kernel, bias_V = arguments
        _, rest = jax.vjp(lambda hidden, bias: product((hidden, kernel, bias)), hidden_BLD, bias_V)
        d_hidden_BLD, d_bias_V = rest(d_logits_BLV)
        h_ND, d_logits_NV = (x.reshape(-1, x.shape[-1]) for x in (hidden_BLD, d_logits_BLV))
        total = _add_product(h_ND, d_logits_NV, total, factors, found, tied=tied)
        # The sum first, or a compiler may keep the gradient of the logits through the backward pass of all layers.
        d_hidden_BLD, total = jax.lax.optimization_barrier((d_hidden_BLD, total))
        return (d_hidden_BLD, None, d_bias_V), total

    return use_and_add(found, product, pull, (hidden_BLD, kernel, bias_V))


def _add_product(
    h_ND: jax.Array, d_logits_NV: jax.Array, total: jax.Array, factors: Factors, found: SumOfUse, *, tied: bool
) -> jax.Array:
    """Add the gradient of the kernel to its sum, in the dtype of the sum, one block of ids at a time."""
    vocabulary, dim = d_logits_NV.shape[1], 0 if tied else 1
    size = vocabulary // num_pieces(vocabulary * h_ND.shape[1], vocabulary)

    def add(total: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        d_logits_NC = jax.lax.dynamic_slice_in_dim(d_logits_NV, start, size, axis=1)
        factored = (d_logits_NC, h_ND) if tied else (h_ND, d_logits_NC)
        block = jax.lax.dot_general(*factored, (((0,), (0,)), ((), ())), preferred_element_type=total.dtype)
        part = sum_and_scatter(block, total.dtype, found.dim) * factors[0] * factors[1]
        before = jax.lax.dynamic_slice_in_dim(total, start, size, axis=dim)
        return jax.lax.dynamic_update_slice_in_dim(total, before + part, start, axis=dim), None

    return jax.lax.scan(add, total, jnp.arange(vocabulary // size) * size)[0]
