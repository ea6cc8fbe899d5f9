"""Model FLOPs: the arithmetic a model asks for, whatever the program spends on it.

Conventions (those of PaLM, Chowdhery et al. 2022, appendix B, and Chinchilla, Hoffmann et al. 2022, appendix F):
a multiply-add is 2 FLOPs; the backward pass is twice the forward pass; recomputation (remat) is not counted, so that
it lowers the utilization; matmuls and convolutions only, no norms, softmax, activations or embedding look-ups.
Unlike both papers, attention counts the pairs of a query and a key that the model lets see each other: causal
attention at half, a sliding window of W of T tokens at W T - W^2 / 2 pairs (twice that, without order). Figures that
count causal attention in full are higher, by 4 to 12 % at usual sizes, and do not compare.

Of frozen parameters the backward pass has no gradient of the weights, and below the lowest block with a trained
parameter none of the inputs. Blocks are the embedding, each stack of layers, the output norm, the head; stem, first and
other blocks of a stage, head (ResNet); layers (MLP). The first layer counts a gradient of its inputs while it is
trained, as published counts do. The two factors of an adapter count as trained layers beside their frozen kernel.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxtrain.config.model import (
    CalledModel,
    CLIPConfig,
    EncoderDecoderConfig,
    MLPConfig,
    ModelConfig,
    ResNetConfig,
    TransformerConfig,
    ViTConfig,
)
from jaxtrain.models.shipped.shapes import (
    ConvShape,
    OuterLayer,
    Stack,
    Structure,
    attention_shapes,
    dense_layers,
    mlp_shapes,
    resnet_stages,
    router_shape,
    stem_shape,
    structure_of,
)
from jaxtrain.ops.attention.rules import visible_pairs

_FLOPS_PER_MULTIPLY_ADD = 2
_HEAD = 4
# Top-level path of a model of transformer blocks -> number of its block, counted from the input. The table of relative
# positions is used in every layer.
_TRANSFORMER_BLOCKS = {
    **dict.fromkeys(("embedding", "positions", "token_types", "embedding_norm", "embedding_projection"), 0),
    **dict.fromkeys(("patches", "class_token"), 0),
    **dict.fromkeys(("relative_positions", "leading"), 1),
    **dict.fromkeys(("blocks", "encoder", "image"), 2),
    **dict.fromkeys(("output_norm", "decoder", "text"), 3),
    **dict.fromkeys(("head", "output", "output_bias", "logit_scale"), _HEAD),
}


@dataclass(frozen=True)
class Product:
    """One matmul or convolution of the forward pass of one row, over all layers of a stack.

    `path` is that of its weight, None where both factors are activations; `alone` says that the block, counted from the
    input, has no other product, so that its input is the input of the block.
    """

    path: str | None
    multiply_adds: float
    block: int
    alone: bool = False


def model_flops_per_row(
    model_config: ModelConfig,
    *,
    sequence_length: int | None,
    input_shape: Sequence[int] | None,
    num_outputs: int | None,
    vocab_size: int | None,
    decoder_length: int | None = None,
    trained: Collection[str] | None = None,
    adapters: Mapping[str, float] | None = None,
    reference: bool = False,
) -> float | None:
    """FLOPs of one forward and backward pass of one row; None for a size or a model that is not known.

    A transformer with L layers, width d, h heads and g key-value heads of width k, MLP width f, vocabulary V takes,
    for a sequence of T tokens with all parameters trained,

        6 T (L (2 d h k + 2 d g k + m d f) + d V)  +  12 L h k P,    m = 2, or 3 with a gate (SwiGLU, GEGLU);

    the first term is 6 per matmul weight and token, the output layer included (tied or not); with E experts of which a
    token takes K, the weights are K m d f and d E of the router; the second is the attention scores and their product
    with the values over the P visible pairs of a query and a key: T^2, halved for causality, fewer with a window, and
    the mean over layers where only some have one. Latent attention has the weights of its own kernels, and k + v for 2
    k of the scores, v being the width of values; blocks before those with experts count theirs. A state space (Mamba
    2) has its kernels and no MLP, and 12 L h k N T for its scores: each token is written to a state of k x N numbers a
    head, and reads it; its convolution is not counted. A head of labels counts its layers, and where it has one output
    per text, for one position.
    A vision transformer has the same for its T patches and class token, without order, 6 (T - 1) p^2 c d for patches of
    p x p pixels of c channels, and 6 d per class. CLIP takes the sum of its two encoders, texts of full length.
    An encoder-decoder takes that of its encoder for S tokens and that of its decoder for T, and for each layer of the
    decoder 12 d h k T + 12 d g k S + 12 h k S T of cross-attention; the output layer counts for T tokens.
    A convolution of kernel n x n takes n^2 c_in c_out multiply-adds a pixel of its output.

    Args:
        model_config: the model; sizes it leaves open come from the arguments below.
        sequence_length: tokens a row (transformer, and the input of an encoder-decoder).
        input_shape: shape of one row without the batch: height, width, channels (ResNet, ViT), or any (MLP).
        num_outputs: classes or targets of the data, where the model names none.
        vocab_size: vocabulary of the data, where the model names none.
        decoder_length: tokens of a row of an encoder-decoder's output; None: as many as the input has.
        trained: paths of the parameters that are trained; None: all are.
        adapters: path of each kernel that has an adapter -> elements of its two factors, as a multiple of the kernel's.
        reference: whether the loss also runs the model that training starts from: one more forward pass.
    """
    products: list[Product]
    match model_config:
        case ResNetConfig():
            num_classes = model_config.num_classes or num_outputs
            if input_shape is None or len(input_shape) != 3 or num_classes is None:
                return None
            products = resnet_products(model_config, input_shape, num_classes)
        case MLPConfig():
            num_outputs = model_config.num_outputs or num_outputs
            if input_shape is None or num_outputs is None:
                return None
            products = mlp_products(model_config, input_shape, num_outputs)
        case CLIPConfig():
            structure = structure_of(model_config, input_shape=(), vocab_size=None, num_outputs=None)
            products = list(itertools.chain(*structure_products(structure).values())) if structure else []
        case TransformerConfig() | EncoderDecoderConfig() | ViTConfig():
            is_vision = isinstance(model_config, ViTConfig)
            shape = input_shape if is_vision else None if sequence_length is None else (sequence_length,)
            vocab_size = None if is_vision else model_config.vocab_size or vocab_size
            head = model_config.head if isinstance(model_config, TransformerConfig) else None
            # What the data must say where the model leaves it open.
            wanted = [model_config.num_classes or num_outputs if is_vision else vocab_size]
            if head is not None and head.has_labels:
                wanted.append(head.num_labels or num_outputs)
            if shape is None or None in wanted:
                return None
            structure = structure_of(
                model_config,
                input_shape=tuple(shape),
                vocab_size=vocab_size,
                num_outputs=num_outputs,
                decoder_length=None if is_vision else decoder_length,
            )
            products = list(itertools.chain(*structure_products(structure).values())) if structure else []
        case CalledModel():
            return None
    lowest = lowest_trained_block(model_config, trained)
    forwards = 1 + reference
    passes = sum(one.multiply_adds * (forwards + backward_passes(one, trained, lowest)) for one in products)
    beside = sum(one.multiply_adds * (adapters or {}).get(one.path or "", 0) for one in products)
    return float(_FLOPS_PER_MULTIPLY_ADD * (passes + (forwards + 2) * beside))


def lowest_trained_block(config: ModelConfig, trained: Collection[str] | None) -> int:
    """Number of the first block, from the input, that holds one of the trained parameters; None: all are trained."""
    return 0 if trained is None else min(block_number(config, path) for path in trained)


def backward_passes(product: Product, trained: Collection[str] | None, lowest: int) -> int:
    """Products of the same size in the backward pass: the gradients of the two factors, as far as they are needed."""
    if product.block < lowest:
        return 0
    weight = product.path is None or trained is None or product.path in trained
    inputs = product.block > lowest or not product.alone or product.block == 0
    return weight + inputs


def block_number(config: ModelConfig, path: str) -> int:
    """Number of the block that a parameter is in, counted from the input."""
    name, _, rest = path.partition("/")
    match config:
        case TransformerConfig() | EncoderDecoderConfig() | ViTConfig() | CLIPConfig():
            return structure_block(path)
        case ResNetConfig():
            if name.startswith("stem"):
                return 0
            if name.startswith("head"):
                return 1 + 2 * len(config.stage_blocks)
            stage, _, part = name.removeprefix("stage").partition("_")
            return 1 + 2 * int(stage) + (part == "rest")
        case MLPConfig():
            return int(rest.partition("/")[0]) if name == "layers" else len(config.hidden_dims)
        case CalledModel():
            raise AssertionError("a model of the user's own has no numbered blocks")


def structure_block(path: str) -> int:
    """Number of the block that a parameter of a model of transformer blocks is in, counted from the input."""
    return _TRANSFORMER_BLOCKS[path.partition("/")[0]]


def structure_products(structure: Structure) -> dict[str, list[Product]]:
    """The products of one row of a model of transformer blocks, by what they are.

    For each stack, with its label before the name: `projections`, `scores` and `mlp` (the MLP or experts), and where it
    attends to another stack `cross projections` and `cross scores`; besides `entry` and `output`.
    """
    found: dict[str, list[Product]] = {}
    for stack in structure.stacks:
        found |= {f"{stack.label}{name}": products for name, products in _stack_products(stack).items()}

    def outer(layers: Sequence[OuterLayer], block: int) -> list[Product]:
        alone = len(layers) == 1
        return [Product(one.path, one.inputs * one.outputs * one.positions, block, alone=alone) for one in layers]

    return {**found, "entry": outer(structure.entry, 0), "output": outer(structure.head, _HEAD)}


def _stack_products(stack: Stack) -> dict[str, list[Product]]:
    config, layers, length = stack.blocks, stack.blocks.num_layers, stack.length
    block = structure_block(stack.path)

    def matmul(name: str, weights: float, positions: int = length) -> Product:
        return Product(f"{stack.path}/{name}/kernel", layers * weights * positions, block)

    chosen = 1 if config.experts is None else config.experts.experts_per_token
    router = () if config.experts is None else (matmul("mlp/router", math.prod(router_shape(config).kernel)),)
    mlp = [matmul(f"mlp/{name}", chosen * math.prod(one.kernel)) for name, one in mlp_shapes(config).items()]
    if config.shared is not None:
        mlp += [matmul(f"shared/{name}", math.prod(one.kernel)) for name, one in mlp_shapes(config.shared).items()]
    attention = attention_shapes(config)
    query_dim, value_dim = math.prod(attention["query"].outputs), math.prod(attention["output"].inputs)
    # Scores and values are one product each over the pairs.
    chunked, causal = config.local_layers is not None and config.local_layers.chunked, config.causal
    pairs = sum(visible_pairs(length, causal=causal, window=one, chunked=chunked) for one in config.windows)
    scores = (query_dim + value_dim) * pairs
    if config.state_space is not None:
        scores = 2 * value_dim * config.state_space.state_dim * length * layers
    found = {
        "projections": [matmul(f"attention/{name}", math.prod(one.kernel)) for name, one in attention.items()],
        "scores": [Product(None, scores, block)],
        "mlp": [*mlp, *router],
    }
    if stack.memory_length is None:
        return found
    positions = {"query": length, "output": length, "key": stack.memory_length, "value": stack.memory_length}
    return found | {
        "cross projections": [
            matmul(f"cross_attention/{name}", math.prod(one.kernel), positions[name]) for name, one in attention.items()
        ],
        "cross scores": [Product(None, layers * 2 * query_dim * length * stack.memory_length, block)],
    }


def resnet_products(config: ResNetConfig, input_shape: Sequence[int], num_classes: int) -> list[Product]:
    """The products of one image, the stride in the 3x3 convolution (as published by Facebook and torchvision: 4.09e9
    multiply-adds for ResNet-50 at 224; the paper's variant, stride in the first 1x1, takes 3.8e9)."""
    height, width, channels = input_shape
    products: list[Product] = []

    def convolve(path: str, shape: ConvShape) -> None:
        nonlocal height, width
        height, width = math.ceil(height / shape.stride), math.ceil(width / shape.stride)
        size = math.prod(shape.kernel) * height * width
        products.append(Product(f"{path}/kernel", size, block_number(config, path), alone=path == "stem"))

    stem = stem_shape(config, channels)
    convolve("stem", stem)
    if config.stem == "imagenet":
        height, width = math.ceil(height / 2), math.ceil(width / 2)
    stages = resnet_stages(config)
    for number, stage in enumerate(stages):
        for part in ("first", *["rest"] * stage.num_rest):
            shape = stage.first if part == "first" else stage.rest
            for index, conv in enumerate(shape.convs):
                convolve(f"stage{number}_{part}/convs/{index}", conv)
            if shape.shortcut is not None:
                # Its output is as large as the block's, so no stride is left to apply.
                convolve(f"stage{number}_{part}/shortcut", replace(shape.shortcut, stride=1))
    head = "head_kernel"
    return [*products, Product(head, stages[-1].outputs * num_classes, block_number(config, head), alone=True)]


def mlp_products(config: MLPConfig, input_shape: Sequence[int], num_outputs: int) -> list[Product]:
    """The products of one record, layer by layer."""
    layers = dense_layers(config, math.prod(input_shape), num_outputs)
    return [
        Product(f"{path}/kernel", math.prod(shape.kernel), number, alone=True)
        for number, (path, shape) in enumerate(layers.items())
    ]
