"""Shapes of the parts of the shipped models, and of all their parameters. No jax here: the planner reads them too.

The models build their layers from the shapes of the parts; `model_tensors` puts the same parts together under the
paths that the models give them, which `tests/plan/test_parameters.py` holds to what the models create.
"""

import itertools
import math
from dataclasses import dataclass

from jaxtrain.config.model import (
    GATED,
    CalledModel,
    EncoderDecoderConfig,
    HeadConfig,
    MLPConfig,
    ModelConfig,
    ResNetConfig,
    TransformerConfig,
    ViTConfig,
    image_sizes,
)
from jaxtrain.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]


def size_of(key: str, *sizes: int | None) -> int:
    """The first size that is known, of the config or of the data; a ConfigError where none is."""
    known = next(filter(None, sizes), None)
    if known is None:
        raise ConfigError(f"model.{key} is not set and the data has none; set model.{key}")
    return known


@dataclass(frozen=True)
class LinearShape:
    """Dims of a kernel: those of the input that it sums over, and those of the output."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def kernel(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return (*self.inputs, *self.outputs)


@dataclass(frozen=True)
class ConvShape:
    """A square convolution: side of its kernel, channels in and out, stride."""

    size: int
    inputs: int
    outputs: int
    stride: int = 1

    @property
    def kernel(self) -> tuple[int, ...]:
        """Shape of the kernel: height, width, channels in, channels out."""
        return (self.size, self.size, self.inputs, self.outputs)


@dataclass(frozen=True)
class ResidualBlockShape:
    """The convolutions of a residual block, and the projection of its shortcut where it has one."""

    convs: tuple[ConvShape, ...]
    shortcut: ConvShape | None


@dataclass(frozen=True)
class ResNetStage:
    """A stage of a ResNet: its first block, and the equal ones after it."""

    first: ResidualBlockShape  # changes the shape
    rest: ResidualBlockShape  # one of the others
    num_rest: int  # how many of them there are
    outputs: int  # channels of the stage


@dataclass(frozen=True)
class Tensors:
    """What a model holds."""

    params: Shapes  # path -> shape
    model_state: Shapes  # path -> shape, float32 (batch statistics)
    stack: str | None = None  # top-level path of the layers that are stacked, for a model that can be pipelined
    sides: tuple[str, ...] = ()  # paths of the stacks of a model that has several, one after the other

    def scan_of(self, path: str) -> str | None:
        """Returns the path of the stack that a parameter is in, whose layers are gathered one at a time; or None."""
        stacks = self.sides if self.stack is None else (self.stack,)
        return next((stack for stack in stacks if path.startswith(f"{stack}/")), None)

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self.params.values()))


def attention_shapes(config: TransformerConfig) -> dict[str, LinearShape]:
    """The linear layers of attention, by name."""
    width = (config.embed_dim,)
    queries, keys = (config.num_heads, config.head_width), (config.kv_heads, config.head_width)
    return {
        "query": LinearShape(width, queries),
        "key": LinearShape(width, keys),
        "value": LinearShape(width, keys),
        "output": LinearShape(queries, width),
    }


def mlp_shapes(config: TransformerConfig) -> dict[str, LinearShape]:
    """The linear layers of a block's MLP, or of one of its experts, by name."""
    width, hidden = (config.embed_dim,), (config.mlp_width,)
    gate = {"gate": LinearShape(width, hidden)} if config.activation in GATED else {}
    return {"up": LinearShape(width, hidden), **gate, "down": LinearShape(hidden, width)}


def has_bias(config: TransformerConfig, name: str) -> bool:
    """Whether a linear layer of a block (query, key, value, output, up, gate, down) has a bias."""
    return config.bias is True or (config.bias == "qkv" and name in ("query", "key", "value"))


def router_shape(config: TransformerConfig) -> LinearShape:
    """The router of a model with experts."""
    assert config.experts is not None
    return LinearShape((config.embed_dim,), (config.experts.num_experts,))


def head_shapes(head: HeadConfig, width: int, num_labels: int | None) -> dict[str, LinearShape]:
    """The linear layers of a head, by name."""
    square = LinearShape((width,), (width,))
    if head.kind == "masked_language_model":
        return {"dense": square}
    hidden = {} if head.hidden is None else {"hidden": square}
    return hidden | ({} if num_labels is None else {"output": LinearShape((width,), (num_labels,))})


def head_tensors(head: HeadConfig, width: int, *, norm: str, vocab_size: int | None, num_labels: int | None) -> Shapes:
    """The parameters of a head, by path."""
    shapes: Shapes = {}
    for name, one in head_shapes(head, width, num_labels).items():
        shapes[f"head/{name}/kernel"] = one.kernel
        if head.bias:
            shapes[f"head/{name}/bias"] = one.outputs
    if head.kind == "masked_language_model":
        assert vocab_size is not None
        shapes["head/norm/scale"] = (width,)
        if head.bias:
            shapes["head/bias"] = (vocab_size,)
            if norm == "layernorm":
                shapes["head/norm/bias"] = (width,)
    return shapes


def patch_shape(config: ViTConfig, channels: int) -> LinearShape:
    """The layer that maps a patch of an image with so many channels to the residual stream."""
    return LinearShape((config.patch_size**2 * channels,), (config.embed_dim,))


def stem_shape(config: ResNetConfig, channels: int) -> ConvShape:
    """The first convolution of a ResNet, for images of so many channels."""
    size, stride = (3, 1) if config.stem == "small" else (7, 2)
    return ConvShape(size, channels, config.width, stride)


def resnet_stages(config: ResNetConfig) -> list[ResNetStage]:
    """The stages of a ResNet: each after the first halves the image and doubles the width."""
    stages, inputs = [], config.width
    for number, count in enumerate(config.stage_blocks):
        width = config.width * 2**number
        outputs = 4 * width if config.bottleneck else width
        first = _residual_block(config, inputs, width, outputs, 1 if number == 0 else 2)
        stages.append(ResNetStage(first, _residual_block(config, outputs, width, outputs, 1), count - 1, outputs))
        inputs = outputs
    return stages


def _residual_block(config: ResNetConfig, inputs: int, width: int, outputs: int, stride: int) -> ResidualBlockShape:
    if config.bottleneck:  # the stride in the 3x3, as in torchvision
        convs = (
            ConvShape(1, inputs, width),
            ConvShape(3, width, width, stride),
            ConvShape(1, width, outputs),
        )
    else:
        convs = (ConvShape(3, inputs, width, stride), ConvShape(3, width, outputs))
    same = inputs == outputs and stride == 1
    return ResidualBlockShape(convs, None if same else ConvShape(1, inputs, outputs, stride))


def dense_layers(config: MLPConfig, num_inputs: int, num_outputs: int) -> dict[str, LinearShape]:
    """The linear layers of a multilayer perceptron by path, the output last."""
    widths = (num_inputs, *config.hidden_dims, num_outputs)
    paths = [*(f"layers/{number}" for number in range(len(config.hidden_dims))), "output"]
    pairs = zip(paths, itertools.pairwise(widths), strict=True)
    return {path: LinearShape((inputs,), (outputs,)) for path, (inputs, outputs) in pairs}


def model_tensors(
    config: ModelConfig, *, input_shape: tuple[int, ...], vocab_size: int | None, num_outputs: int | None
) -> Tensors:
    """The tensors of the model that a config describes."""
    match config:
        case TransformerConfig():
            assert vocab_size is not None
            return Tensors(_transformer(config, vocab_size, num_outputs), {}, "blocks")
        case EncoderDecoderConfig():
            assert vocab_size is not None
            return Tensors(_encoder_decoder(config, vocab_size), {}, sides=("encoder/blocks", "decoder/blocks"))
        case ResNetConfig():
            assert num_outputs is not None
            return _resnet(config, input_shape[-1], num_outputs)
        case ViTConfig():
            num_classes = config.num_classes or num_outputs
            assert num_classes is not None
            return Tensors(_vit(config, input_shape, num_classes), {}, "blocks")
        case MLPConfig():
            assert num_outputs is not None
            layers = dense_layers(config, math.prod(input_shape), num_outputs)
            return Tensors(_with_biases(layers), {})
        case CalledModel():
            raise AssertionError("the tensors of a model of the user's own are known from its init")


def _with_biases(layers: dict[str, LinearShape]) -> Shapes:
    shapes: Shapes = {}
    for path, one in layers.items():
        shapes |= {f"{path}/kernel": one.kernel, f"{path}/bias": one.outputs}
    return shapes


def _transformer(config: TransformerConfig, vocab_size: int, num_outputs: int | None) -> Shapes:
    layers, width = config.num_layers, config.embed_dim

    def norm(path: str, *lead: int, dim: int = width, bias: bool = config.bias is True) -> Shapes:
        bias = bias and config.norm == "layernorm"
        return {f"{path}/{name}": (*lead, dim) for name in (["bias"] if bias else []) + ["scale"]}

    def linear(path: str, name: str, shape: LinearShape, *lead: int) -> Shapes:
        shapes: Shapes = {f"{path}/{name}/kernel": (layers, *lead, *shape.kernel)}
        return shapes | ({f"{path}/{name}/bias": (layers, *shape.outputs)} if has_bias(config, name) else {})

    shapes: Shapes = {"embedding": (vocab_size, width)}
    if config.position == "learned":
        shapes["positions"] = (config.max_sequence_length + config.position_offset, width)
    if config.token_types:
        shapes["token_types"] = (config.token_types, width)
    if config.position == "relative":
        shapes["relative_positions"] = (config.relative_buckets, config.num_heads)
    if config.embedding_norm:
        shapes |= norm("embedding_norm")
    shapes |= norm("blocks/attention_norm", layers) | norm("blocks/mlp_norm", layers)
    if config.block == "sandwich":
        shapes |= norm("blocks/attention_output_norm", layers) | norm("blocks/mlp_output_norm", layers)
    if config.qk_norm:
        for name in ("query_norm", "key_norm"):
            shapes |= norm(f"blocks/attention/{name}", layers, dim=config.head_width, bias=False)
    for name, shape in attention_shapes(config).items():
        shapes |= linear("blocks/attention", name, shape)
    experts = () if config.experts is None else (config.experts.num_experts,)
    if experts:
        shapes["blocks/mlp/router/kernel"] = (layers, *router_shape(config).kernel)
    for name, shape in mlp_shapes(config).items():
        shapes |= linear("blocks/mlp", name, shape, *experts)
    if config.block != "post":
        shapes |= norm("output_norm")
    if config.has_output_layer and not config.tie_embeddings:
        shapes["output"] = (width, vocab_size)
    if config.head is not None:
        labels = (config.head.num_labels or num_outputs) if config.head.has_labels else None
        shapes |= head_tensors(config.head, width, norm=config.norm, vocab_size=vocab_size, num_labels=labels)
    return shapes


def _vit(config: ViTConfig, input_shape: tuple[int, ...], num_classes: int) -> Shapes:
    image_size, channels = image_sizes(config, input_shape)
    width, patches = config.embed_dim, patch_shape(config, channels)
    blocks = config.blocks(image_size)
    shapes: Shapes = {"patches/kernel": patches.kernel, "patches/bias": patches.outputs}
    if config.pooling == "first":
        shapes["class_token"] = (width,)
    shapes["positions"] = (blocks.max_sequence_length, width)
    shapes |= {path: shape for path, shape in _transformer(blocks, 1, None).items() if path.startswith("blocks/")}
    shapes |= {"output_norm/bias": (width,), "output_norm/scale": (width,)}
    return shapes | head_tensors(config.head, width, norm="layernorm", vocab_size=None, num_labels=num_classes)


def _encoder_decoder(config: EncoderDecoderConfig, vocab_size: int) -> Shapes:
    """Those of two transformers without embedding and output layer, and of the decoder's cross-attention."""
    whole = ("embedding", "output")
    encoder, decoder = (_transformer(stack, vocab_size, None) for stack in (config.encoder_stack, config.decoder_stack))
    shapes: Shapes = {"embedding": encoder["embedding"]}
    shapes |= {f"encoder/{path}": shape for path, shape in encoder.items() if path not in whole}
    shapes |= {f"decoder/{path}": shape for path, shape in decoder.items() if path not in whole}
    for path, shape in decoder.items():
        if path.startswith("blocks/attention"):  # its norm too
            shapes["decoder/" + path.replace("attention", "cross_attention", 1)] = shape
    if not config.tie_embeddings:
        shapes["output"] = (config.embed_dim, vocab_size)
    return shapes


def _resnet(config: ResNetConfig, channels: int, num_classes: int) -> Tensors:
    params: Shapes = {}
    state: Shapes = {}

    def normed(path: str, norm: str, shape: ConvShape, *lead: int) -> None:
        params[f"{path}/kernel"] = (*lead, *shape.kernel)
        for name in ("scale", "bias"):
            params[f"{norm}/{name}"] = (*lead, shape.outputs)
        for name in ("mean", "variance"):
            state[f"{norm}/{name}"] = (*lead, shape.outputs)

    def block(path: str, shape: ResidualBlockShape, *lead: int) -> None:
        for index, conv in enumerate(shape.convs):
            normed(f"{path}/convs/{index}", f"{path}/norms/{index}", conv, *lead)
        if shape.shortcut is not None:
            normed(f"{path}/shortcut", f"{path}/shortcut_norm", shape.shortcut, *lead)

    normed("stem", "stem_norm", stem_shape(config, channels))
    stages = resnet_stages(config)
    for number, stage in enumerate(stages):
        block(f"stage{number}_first", stage.first)
        if stage.num_rest:
            block(f"stage{number}_rest", stage.rest, stage.num_rest)
    params["head_kernel"], params["head_bias"] = (stages[-1].outputs, num_classes), (num_classes,)
    return Tensors(params, state)


OF_BLOCKS = (TransformerConfig, EncoderDecoderConfig, ViTConfig)
"""Configs of models of transformer blocks."""


@dataclass(frozen=True)
class Stack:
    """Equal blocks."""

    path: str  # of their parameters
    blocks: TransformerConfig  # what they are; what the config says of embeddings and head means nothing
    length: int  # positions of a row
    # positions of another stack's output that each block attends to besides; None: it does not.
    memory_length: int | None = None

    @property
    def label(self) -> str:
        """The name of the stack for people, before a name: empty where a model has no other one."""
        side, _, inner = self.path.partition("/")
        return f"{side} " if inner else ""


@dataclass(frozen=True)
class OuterLayer:
    """A linear layer before or after the stacks.

    Attributes:
        path: of its kernel.
        inputs, outputs: its widths.
        positions: of a row that it is applied to.
    """

    path: str
    inputs: int
    outputs: int
    positions: int


@dataclass(frozen=True)
class Structure:
    """A model of transformer blocks."""

    stacks: tuple[Stack, ...]  # in the order in which they run
    entry: tuple[OuterLayer, ...]  # linear layers before the first stack
    head: tuple[OuterLayer, ...]  # linear layers after the last stack, in their order
    # ids of which the last layer of the head gives a logit for each position; None: it gives none.
    vocabulary: int | None


def structure_of(
    config: ModelConfig,
    *,
    input_shape: tuple[int, ...],
    vocab_size: int | None,
    num_outputs: int | None,
    decoder_length: int | None = None,
) -> Structure | None:
    """The structure of a model; None for one without transformer blocks."""
    match config:
        case TransformerConfig():
            assert vocab_size is not None
            stack = Stack("blocks", config, input_shape[0])
            head = _transformer_head(config, input_shape[0], vocab_size, num_outputs)
            return Structure((stack,), (), head, vocab_size if config.has_output_layer else None)
        case EncoderDecoderConfig():
            assert vocab_size is not None
            length = input_shape[0]
            written = decoder_length or length
            stacks = (
                Stack("encoder/blocks", config.encoder_stack, length),
                Stack("decoder/blocks", config.decoder_stack, written, length),
            )
            return Structure(stacks, (), (_vocabulary_layer(config, vocab_size, written),), vocab_size)
        case ViTConfig():
            image_size, channels = image_sizes(config, input_shape)
            width, tokens = config.embed_dim, config.num_tokens(image_size)
            patches = tokens - (config.pooling == "first")
            inputs = math.prod(patch_shape(config, channels).inputs)
            classes = config.num_classes or num_outputs
            assert classes is not None
            return Structure(
                (Stack("blocks", config.blocks(image_size), tokens),),
                (OuterLayer("patches/kernel", inputs, width, patches),),
                (OuterLayer("head/output/kernel", width, classes, 1),),
                None,
            )
        case _:
            return None


def _vocabulary_layer(config: TransformerConfig | EncoderDecoderConfig, vocab_size: int, positions: int) -> OuterLayer:
    """The layer whose outputs are logits of the vocabulary."""
    path = "embedding" if config.tie_embeddings else "output"
    return OuterLayer(path, config.embed_dim, vocab_size, positions)


def _transformer_head(
    config: TransformerConfig, length: int, vocab_size: int, num_outputs: int | None
) -> tuple[OuterLayer, ...]:
    """The layers after the blocks of a transformer."""
    head, width = config.head, config.embed_dim
    layers: tuple[OuterLayer, ...] = ()
    if head is not None:
        labels = (head.num_labels or num_outputs) if head.has_labels else None
        positions = 1 if head.is_pooled else length
        layers = tuple(
            OuterLayer(f"head/{name}/kernel", math.prod(shape.inputs), math.prod(shape.outputs), positions)
            for name, shape in head_shapes(head, width, labels).items()
        )
    if not config.has_output_layer:
        return layers
    return (*layers, _vocabulary_layer(config, vocab_size, length))
