"""The plain formula of a mixture of experts, to which the tests compare the grouped one.

Shapes: B batch, L sequence, D embed, F hidden width, E experts, K experts per token.
"""

import jax
import jax.numpy as jnp

from jaxtrain.ops.elementwise import GATED, gelu
from jaxtrain.ops.experts.compute import Kernels


def dense_experts(x_BLD: jax.Array, weights_BLK: jax.Array, ids_BLK: jax.Array, kernels: Kernels) -> jax.Array:
    """Every expert on every token, weighted by 0 where it was not chosen: [B, L, D] in the dtype of x."""

    def of(bias: jax.Array | None) -> jax.Array | int:
        return 0 if bias is None else bias[None, None]

    up_BLEF = jnp.einsum("BLD,EDF->BLEF", x_BLD, kernels.up) + of(kernels.up_bias)
    if kernels.gate is None:
        hidden_BLEF = gelu(up_BLEF)
    else:
        gate_BLEF = jnp.einsum("BLD,EDF->BLEF", x_BLD, kernels.gate) + of(kernels.gate_bias)
        hidden_BLEF = GATED[kernels.activation](gate_BLEF, up_BLEF)
    y_BLED = jnp.einsum("BLEF,EFD->BLED", hidden_BLEF, kernels.down) + of(kernels.down_bias)
    one_hot_BLKE = jax.nn.one_hot(ids_BLK, kernels.up.shape[0], dtype=jnp.float32)
    weights_BLE = jnp.einsum("BLK,BLKE->BLE", weights_BLK, one_hot_BLKE)
    return jnp.einsum("BLE,BLED->BLD", weights_BLE, y_BLED.astype(jnp.float32)).astype(x_BLD.dtype)
