"""Model FLOPs: the arithmetic a model asks for, whatever the program spends on it.

Conventions (those of PaLM, Chowdhery et al. 2022, appendix B, and Chinchilla, Hoffmann et al. 2022, appendix F):
a multiply-add is 2 FLOPs; the backward pass is twice the forward pass; recomputation (remat) is not counted, so that
it lowers the utilization; matmuls and convolutions only, no norms, softmax, activations or embedding look-ups.
Unlike both papers, causal attention is counted at half, since half of the score matrix is masked; figures that count
it in full are higher, by 4 to 12 % at usual sizes, and do not compare.
"""

import itertools
import math
from collections.abc import Sequence

from jaxtrain.config.models import MLPConfig, ModelConfig, ResNetConfig, TransformerConfig

# One forward pass and a backward pass of two: gradients of the inputs and of the weights.
_FORWARD_AND_BACKWARD = 3
_FLOPS_PER_MULTIPLY_ADD = 2


def model_flops_per_row(
    model_config: ModelConfig,
    *,
    sequence_length: int | None,
    input_shape: Sequence[int] | None,
    num_outputs: int | None,
    vocab_size: int | None,
) -> float | None:
    """FLOPs of one forward and backward pass of one row (a sequence, an image, a record).

    A transformer with L layers, width d, h heads and g key-value heads of width k, MLP width f, vocabulary V takes,
    for a sequence of T tokens,

        6 T (L (2 d h k + 2 d g k + m d f) + d V)  +  6 L h k T^2,    m = 2 (GELU) or 3 (SwiGLU);

    the first term is 6 per matmul weight and token, the output layer included (tied or not), the embedding look-up
    not; with E experts of which a token takes K, the weights are those it meets, K m d f and d E of the router;
    the second is the attention scores and their product with the values, 12 L h k T^2 halved for causality.
    A convolution of kernel n x n takes n^2 c_in c_out multiply-adds a pixel of its output.

    Args:
        model_config: the model; sizes it leaves open come from the arguments below.
        sequence_length: tokens a row (transformer).
        input_shape: shape of one row without the batch: height, width, channels (ResNet), or any (MLP).
        num_outputs: classes or targets of the data, where the model names none.
        vocab_size: vocabulary of the data, where the model names none.

    Returns:
        FLOPs as a float, or None where a size that the model needs is not known.
    """
    if isinstance(model_config, TransformerConfig):
        multiply_adds = _transformer(model_config, sequence_length, model_config.vocab_size or vocab_size)
    elif isinstance(model_config, ResNetConfig):
        multiply_adds = _resnet(model_config, input_shape, model_config.num_classes or num_outputs)
    else:
        multiply_adds = _mlp(model_config, input_shape, model_config.num_outputs or num_outputs)
    if multiply_adds is None:
        return None
    return float(_FORWARD_AND_BACKWARD * _FLOPS_PER_MULTIPLY_ADD * multiply_adds)


def _transformer(config: TransformerConfig, sequence_length: int | None, vocab_size: int | None) -> float | None:
    """Multiply-adds of the forward pass of one sequence."""
    if sequence_length is None or vocab_size is None:
        return None
    head_dim = config.head_dim or config.embed_dim // config.num_heads
    query_dim = config.num_heads * head_dim
    key_value_dim = (config.num_kv_heads or config.num_heads) * head_dim
    projections = 2 * config.embed_dim * (query_dim + key_value_dim)
    mlp_matrices = 3 if config.activation == "swiglu" else 2
    mlp = mlp_matrices * config.embed_dim * (config.mlp_dim or 4 * config.embed_dim)
    if config.experts is not None:
        mlp = mlp * config.experts.experts_per_token + config.embed_dim * config.experts.num_experts
    weights = config.num_layers * (projections + mlp) + config.embed_dim * vocab_size
    # Scores and values are one product each over all pairs of tokens; causality keeps half of the pairs.
    attention = config.num_layers * 2 * query_dim * sequence_length**2 / 2
    return weights * sequence_length + attention


def _resnet(config: ResNetConfig, input_shape: Sequence[int] | None, num_classes: int | None) -> float | None:
    """Multiply-adds of the forward pass of one image, the stride in the 3x3 convolution (as published by Facebook
    and torchvision: 4.09e9 for ResNet-50 at 224; the paper's variant, stride in the first 1x1, takes 3.8e9)."""
    if input_shape is None or len(input_shape) != 3 or num_classes is None:
        return None
    height, width, channels = input_shape
    total = 0

    def convolve(kernel: int, channels_in: int, channels_out: int, stride: int) -> None:
        nonlocal height, width, total
        height, width = math.ceil(height / stride), math.ceil(width / stride)
        total += kernel**2 * channels_in * channels_out * height * width

    if config.stem == "imagenet":
        convolve(7, channels, config.width, 2)
        height, width = math.ceil(height / 2), math.ceil(width / 2)
    else:
        convolve(3, channels, config.width, 1)
    channels = config.width
    for stage, num_blocks in enumerate(config.stage_blocks):
        inner = config.width * 2**stage
        outer = 4 * inner if config.bottleneck else inner
        for block in range(num_blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            if config.bottleneck:
                convolve(1, channels, inner, 1)
                convolve(3, inner, inner, stride)
                convolve(1, inner, outer, 1)
            else:
                convolve(3, channels, inner, stride)
                convolve(3, inner, outer, 1)
            if channels != outer or stride != 1:
                # The shortcut's projection: its output is as large as the block's, so no stride is left to apply.
                convolve(1, channels, outer, 1)
            channels = outer
    return total + channels * num_classes


def _mlp(config: MLPConfig, input_shape: Sequence[int] | None, num_outputs: int | None) -> float | None:
    """Multiply-adds of the forward pass of one record."""
    if input_shape is None or num_outputs is None:
        return None
    widths = (math.prod(input_shape), *config.hidden_dims, num_outputs)
    return sum(a * b for a, b in itertools.pairwise(widths))
