"""The relative positions of the shipped transformers: one table for all blocks of a stack.

Shapes: N buckets, H query heads, W distances of keys and queries.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.model import TransformerConfig
from jaxtrain.layout.sharding import constrain
from jaxtrain.models.initializers import normal
from jaxtrain.models.shipped.initial import INIT_STDDEV
from jaxtrain.ops.attention.reference import distance_bias


def relative_table(config: TransformerConfig, rngs: nnx.Rngs, stddev: float = INIT_STDDEV) -> nnx.Param | None:
    """Draw the table [N, H] of a stack, where its positions are relative."""
    if config.position != "relative":
        return None
    shape = (config.relative_buckets, config.num_heads)
    return nnx.Param(normal(stddev)(rngs.params(), shape, jnp.float32))


def relative_bias(table: nnx.Param | None, config: TransformerConfig, reach: int) -> jax.Array | None:
    """Compute what every block of a stack adds to its scores, where its positions are relative.

    Args:
        table: from `relative_table`.
        config: of the stack.
        reach: the largest distance of a key and a query.

    Returns:
        float32 [H, W] for the W = 2 * reach + 1 distances, as `self_attention` takes it.
    """
    if table is None:
        return None
    with jax.named_scope("relative_positions"):
        bias_HW = distance_bias(table[...], reach, max_distance=config.relative_max_distance, causal=config.causal)
        return constrain(bias_HW, "activation_heads", None)
