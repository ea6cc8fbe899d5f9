"""The standard deviations that kernels of the transformer's blocks start with."""

import math
from dataclasses import dataclass

from jaxtrain.config.model import TransformerConfig

INIT_STDDEV = 0.02  # GPT-2, Radford et al. 2019


@dataclass(frozen=True)
class Stddevs:
    """Standard deviations of the kernels of a stack.

    Attributes:
        query: of the layer that makes queries.
        key_value: of those that make keys and values.
        attention_output: of the layer after attention.
        up: of the first layers of the MLP, gate and experts included.
        down: of its last layer.
        relative: of the table of relative positions.
    """

    query: float
    key_value: float
    attention_output: float
    up: float
    down: float
    relative: float


def small_stddevs(config: TransformerConfig) -> Stddevs:
    """Those of GPT-2: the deeper the model, the smaller the outputs to the residual stream start (section 2.3)."""
    out = INIT_STDDEV / math.sqrt(2 * config.num_layers)
    return Stddevs(INIT_STDDEV, INIT_STDDEV, out, INIT_STDDEV, out, INIT_STDDEV)


def fan_in_stddevs(config: TransformerConfig) -> Stddevs:
    """Those of T5, for embeddings of variance 1: outputs to the residual stream are as large as the embeddings.

    Smaller ones would leave the embedding of the token itself in the stream, which tied embeddings then name as the
    next token with certainty. Queries start smaller by the scale that T5 leaves out of the scores.
    """
    width, head_dim = config.embed_dim**-0.5, config.head_width
    scale = head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    return Stddevs(
        query=width * head_dim**-0.5 / scale,
        key_value=width,
        attention_output=(config.num_heads * head_dim) ** -0.5,
        up=width,
        down=config.mlp_width**-0.5,
        relative=width,
    )
