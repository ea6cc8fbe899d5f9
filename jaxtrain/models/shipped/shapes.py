"""Shapes and logical axes of the parameters of the shipped models, and their structure. No jax here: the planner asks.

`model_tensors` puts the shapes of the parts, of which models build their layers, together under the models' paths;
`tests/plan/test_parameters.py` holds them to what the models create.
"""

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtrain.config.model import (
    GATED,
    CLIPConfig,
    EncoderDecoderConfig,
    LatentConfig,
    MLPConfig,
    ModelConfig,
    ResNetConfig,
    TransformerConfig,
    ViTConfig,
    image_sizes,
)
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import FamilyTable

Shapes = dict[str, tuple[int, ...]]
Names = tuple[str | None, ...]
# path -> shape and logical axes of a parameter; None: sharded by the default rule
Rows = dict[str, tuple[tuple[int, ...], Names | None]]


def size_of(key: str, *sizes: int | None) -> int:
    """The first size that is known, of the config or of the data; a ConfigError where none is."""
    known = next(filter(None, sizes), None)
    if known is None:
        raise ConfigError(f"model.{key} is not set and the data has none; set model.{key}")
    return known


@dataclass(frozen=True)
class LinearShape:
    """Dims of a kernel: those of the input that it sums over, those of the output, and the logical axes of both."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    axes: Names

    @property
    def kernel(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return (*self.inputs, *self.outputs)

    @property
    def of_heads(self) -> bool:
        """Whether inputs or outputs are of heads."""
        return "heads" in self.axes or "kv_heads" in self.axes


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
    axes: FamilyTable  # path -> logical axes; one that is left out is sharded by the default rule
    model_state: Shapes = field(default_factory=dict)  # path -> shape, float32 (batch statistics)
    stack: str | None = None  # top-level path of the layers that are stacked, for a model that can be pipelined
    sides: tuple[str, ...] = ()  # paths of other stacks, which run one after the other

    def scan_of(self, path: str) -> str | None:
        """Returns the path of the stack that a parameter is in, whose layers are gathered one at a time; or None."""
        stacks = self.sides if self.stack is None else (*self.sides, self.stack)
        return next((stack for stack in stacks if path.startswith(f"{stack}/")), None)

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self.params.values()))


def inner_width(config: TransformerConfig) -> int:
    """Numbers of heads per token that attention, or a state space, keeps beside results of its linear layers."""
    # Of a state space: convolved values, their chunks and outputs, states, the sum with what skips them, its norm.
    return config.num_heads * config.head_width * (1 if config.state_space is None else 7)


CONVOLVED = ("query", "key", "value")
"""What a causal convolution sums over neighbours before a state space."""


def attention_shapes(config: TransformerConfig) -> dict[str, LinearShape]:
    """The linear layers of attention, or of the state space in its place, by name."""
    width = (config.embed_dim,)
    queries, keys = (config.num_heads, config.head_width), (config.kv_heads, config.head_width)
    if config.latent is not None:
        return _latent_shapes(config, config.latent)
    if config.state_space is not None:
        said = config.state_space
        shared = LinearShape(width, (said.groups, said.state_dim), ("embed", None, "head_dim"))
        value = LinearShape(width, queries, ("embed", "heads", "head_dim"))
        step = LinearShape(width, (config.num_heads,), ("embed", "heads"))
        output = LinearShape(queries, width, ("heads", "head_dim", "embed"))
        return {"query": shared, "key": shared, "value": value, "gate": value, "step": step, "output": output}
    return {
        "query": LinearShape(width, queries, ("embed", "heads", "head_dim")),
        "key": LinearShape(width, keys, ("embed", "kv_heads", "head_dim")),
        "value": LinearShape(width, keys, ("embed", "kv_heads", "head_dim")),
        "output": LinearShape(queries, width, ("heads", "head_dim", "embed")),
    }


def _latent_shapes(config: TransformerConfig, latent: LatentConfig) -> dict[str, LinearShape]:
    width, heads, rank = (config.embed_dim,), config.num_heads, (latent.key_value_rank,)
    of_queries = width if latent.query_rank is None else (latent.query_rank,)
    beside = (latent.key_value_rank + latent.rope_dim,)  # the part of keys that heads share
    to_heads, to_latent = ("embed", "heads", "head_dim"), ("embed", "head_dim")
    of_stream = {} if latent.query_rank is None else {"query_latent": LinearShape(width, of_queries, to_latent)}
    return of_stream | {
        "query": LinearShape(of_queries, (heads, config.head_width), to_heads),
        "key_value_latent": LinearShape(width, beside, to_latent),
        "key_value": LinearShape(rank, (heads, latent.nope_dim + latent.value_dim), to_heads),
        "output": LinearShape((heads, latent.value_dim), width, ("heads", "head_dim", "embed")),
    }


def latent_width(config: TransformerConfig) -> int:
    """Numbers per token that attention's linear layers give beside those of heads and of the residual stream."""
    return sum(math.prod(one.outputs) for one in attention_shapes(config).values() if not one.of_heads)


def convolution_shapes(config: TransformerConfig) -> dict[str, LinearShape]:
    """The convolutions of a state space, each of its channels by itself, by name."""
    if config.state_space is None:
        return {}
    of, width = attention_shapes(config), (config.state_space.conv_width,)
    return {f"{name}_conv": LinearShape(width, of[name].outputs, (None, *of[name].axes[1:])) for name in CONVOLVED}


def mlp_shapes(config: TransformerConfig) -> dict[str, LinearShape]:
    """The linear layers of a block's MLP, or of one of its experts, by name; none in a block with a state space."""
    if config.state_space is not None:
        return {}
    width, hidden = (config.embed_dim,), (config.mlp_width,)
    up = LinearShape(width, hidden, ("embed", "mlp"))
    gate = {"gate": up} if config.activation in GATED else {}
    return {"up": up, **gate, "down": LinearShape(hidden, width, ("mlp", "embed"))}


def norm_names(config: TransformerConfig) -> tuple[str, ...]:
    """The norms of a block: of the inputs of attention and MLP, or of the sums after them, and of their outputs."""
    inputs, outputs = ("attention_norm", "mlp_norm"), ("attention_output_norm", "mlp_output_norm")
    forms = {"sandwich": inputs + outputs, "output": outputs, "parallel_one_norm": inputs[:1]}
    if config.state_space is not None:
        return inputs[:1]
    return forms.get(config.block, inputs)


def attention_norm_shapes(config: TransformerConfig) -> dict[str, LinearShape]:
    """The scales of the norms inside attention, of queries and keys or of latents, as linear layers without inputs."""
    if config.latent is not None:
        ranks = {"query_latent_norm": config.latent.query_rank, "key_value_latent_norm": config.latent.key_value_rank}
        return {name: LinearShape((), (rank,), (None,)) for name, rank in ranks.items() if rank is not None}
    if config.state_space is not None:
        return {"norm": LinearShape((), (config.num_heads, config.head_width), ("heads", "head_dim"))}
    if config.qk_norm in (False, "rotated"):
        return {}
    if config.qk_norm is True:
        return dict.fromkeys(("query_norm", "key_norm"), LinearShape((), (config.head_width,), ("head_dim",)))
    heads = LinearShape((), (config.num_heads, config.head_width), ("heads", "head_dim"))
    groups = LinearShape((), (config.kv_heads, config.head_width), ("kv_heads", "head_dim"))
    return {"query_norm": heads, "key_norm": groups}


def router_shape(config: TransformerConfig) -> LinearShape:
    """The router of a model with experts."""
    assert config.experts is not None
    return LinearShape((config.embed_dim,), (config.experts.num_experts,), ("embed", None))


def embedding_projection_shape(config: TransformerConfig) -> LinearShape | None:
    """The layer that maps embeddings to the residual stream, where they have another width."""
    if config.table_width == config.embed_dim:
        return None
    return LinearShape((config.table_width,), (config.embed_dim,), (None, "embed"))


def head_shapes(config: TransformerConfig, num_labels: int | None) -> dict[str, LinearShape]:
    """The linear layers of a model's head, by name."""
    assert config.head is not None

    def layer(outputs: int) -> LinearShape:
        return LinearShape((config.embed_dim,), (outputs,), ("embed", None))

    if config.head.kind == "masked_language_model":
        return {"dense": layer(config.output_width)}
    hidden = {} if config.head.hidden is None else {"hidden": layer(config.embed_dim)}
    return hidden if num_labels is None else hidden | {"output": layer(num_labels)}


def head_norm_name(config: TransformerConfig) -> str | None:
    """The norm of a model's head, if it has one."""
    assert config.head is not None
    if config.head.kind == "masked_language_model":
        return "norm"
    return "hidden_norm" if config.head.hidden_norm else None


def patch_shape(config: ViTConfig, channels: int) -> LinearShape:
    """The layer that maps a patch of an image with so many channels to the residual stream."""
    return LinearShape((config.patch_size**2 * channels,), (config.embed_dim,), (None, "embed"))


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
        convs = (ConvShape(1, inputs, width), ConvShape(3, width, width, stride), ConvShape(1, width, outputs))
    else:
        convs = (ConvShape(3, inputs, width, stride), ConvShape(3, width, outputs))
    same = inputs == outputs and stride == 1
    return ResidualBlockShape(convs, None if same else ConvShape(1, inputs, outputs, stride))


def dense_layers(config: MLPConfig, num_inputs: int, num_outputs: int) -> dict[str, LinearShape]:
    """The linear layers of a multilayer perceptron by path, the output last.

    Over `tensor`, layers alternate between sharded outputs and sharded inputs (Shoeybi et al. 2019).
    """
    layers = {}
    for number, (inputs, outputs) in enumerate(itertools.pairwise((num_inputs, *config.hidden_dims))):
        axes = ("embed", "mlp") if number % 2 == 0 else ("mlp", "embed")
        layers[f"layers/{number}"] = LinearShape((inputs,), (outputs,), axes)
    last = (num_inputs, *config.hidden_dims)[-1]
    return layers | {"output": LinearShape((last,), (num_outputs,), ("embed", None))}


def model_tensors(
    config: ModelConfig,
    *,
    input_shape: tuple[int, ...] = (),
    vocab_size: int | None = None,
    num_outputs: int | None = None,
) -> Tensors:
    """The tensors of the model that a config describes."""
    match config:
        case TransformerConfig():
            assert vocab_size is not None
            rows = _transformer(config, vocab_size, num_outputs)
            return _tensors(rows, stack="blocks", sides=() if config.leading is None else ("leading",))
        case EncoderDecoderConfig():
            assert vocab_size is not None
            return _tensors(_encoder_decoder(config, vocab_size), sides=("encoder/blocks", "decoder/blocks"))
        case ResNetConfig():
            assert num_outputs is not None
            return _resnet(config, input_shape[-1], num_outputs)
        case ViTConfig():
            num_classes = config.num_classes or num_outputs
            assert num_classes is not None
            return _tensors(_vit(config, input_shape, num_classes), stack="blocks")
        case CLIPConfig():
            return _tensors(_clip(config), sides=("image/blocks", "text/blocks"))
        case _:
            assert isinstance(config, MLPConfig)
            assert num_outputs is not None
            rows = {}
            for path, one in dense_layers(config, math.prod(input_shape), num_outputs).items():
                rows |= _linear(path, one)
            return _tensors(rows)


def _tensors(rows: Rows, **more: Any) -> Tensors:
    axes = FamilyTable({path: names for path, (_, names) in rows.items() if names is not None})
    return Tensors({path: shape for path, (shape, _) in rows.items()}, axes, **more)


def _linear(path: str, one: LinearShape, *, bias: bool = True, layers: int | None = None) -> Rows:
    """Kernel and bias of a linear layer, alone or stacked."""
    lead, name = ((), ()) if layers is None else ((layers,), ("layers",))
    rows: Rows = {f"{path}/kernel": ((*lead, *one.kernel), (*name, *one.axes))}
    if bias:
        rows[f"{path}/bias"] = ((*lead, *one.outputs), (*name, *one.axes[len(one.inputs) :]))
    return rows


def _norm(path: str, config: TransformerConfig, *, layers: int | None = None, width: int | None = None) -> Rows:
    """Scale and bias of a norm of the residual stream, or of another width."""
    names, width = ("bias", "scale") if config.norms_have_biases else ("scale",), width or config.embed_dim
    row = ((width,), ("embed",)) if layers is None else ((layers, width), ("layers", "embed"))
    return {f"{path}/{name}": row for name in names}


def _stack(config: TransformerConfig) -> Rows:
    """A stack of blocks, its relative positions and the norm after it."""
    layers, rows = config.num_layers, Rows()
    if config.position == "relative":
        rows["relative_positions"] = ((config.relative_buckets, config.num_heads), (None, "heads"))
    for name in norm_names(config):
        rows |= _norm(f"blocks/{name}", config, layers=layers)
    for name, one in attention_norm_shapes(config).items():
        rows[f"blocks/attention/{name}/scale"] = ((layers, *one.outputs), ("layers", *one.axes))
    per_head = ("sinks",) if config.attention_sinks else ()
    for name in per_head if config.state_space is None else ("log_decay", "step_bias", "skip"):
        rows[f"blocks/attention/{name}"] = ((layers, config.num_heads), ("layers", "heads"))
    for name, one in convolution_shapes(config).items():
        rows |= _linear(f"blocks/attention/{name}", one, layers=layers)
    for name, one in attention_shapes(config).items():
        rows |= _linear(f"blocks/attention/{name}", one, bias=config.has_bias(name), layers=layers)
    if config.experts is not None:
        rows |= _linear("blocks/mlp/router", router_shape(config), bias=config.has_bias("up"), layers=layers)
        if config.experts.score_bias:
            rows["blocks/mlp/score_bias"] = ((layers, config.experts.num_experts), ("layers", None))
    for name, one in mlp_shapes(config.shared).items() if config.shared is not None else ():
        rows |= _linear(f"blocks/shared/{name}", one, bias=config.has_bias(name), layers=layers)
    for name, one in mlp_shapes(config).items():
        if config.experts is None:
            rows |= _linear(f"blocks/mlp/{name}", one, bias=config.has_bias(name), layers=layers)
        else:
            lead, names = (layers, config.experts.num_experts), ("layers", "experts")
            rows[f"blocks/mlp/{name}/kernel"] = ((*lead, *one.kernel), (*names, *one.axes))
            if config.has_bias(name):
                rows[f"blocks/mlp/{name}/bias"] = ((*lead, *one.outputs), (*names, *one.axes[len(one.inputs) :]))
    return rows if config.block == "post" else rows | _norm("output_norm", config)


def _transformer(config: TransformerConfig, vocab_size: int, num_outputs: int | None) -> Rows:
    width, projection = config.table_width, embedding_projection_shape(config)
    rows: Rows = {"embedding": ((vocab_size, width), ("vocab", "embed"))}
    if config.position == "learned":
        rows["positions"] = ((config.max_sequence_length + config.position_offset, width), (None, "embed"))
    if config.token_types:
        rows["token_types"] = ((config.token_types, width), (None, "embed"))
    if config.embedding_norm is True:
        rows |= _norm("embedding_norm", config, width=width)
    rows |= {} if projection is None else _linear("embedding_projection", projection)
    rows |= _stack(config)
    for path, (shape, names) in _stack(config.leading).items() if config.leading is not None else ():
        if path.startswith("blocks/"):
            assert names is not None
            rows[path.replace("blocks", "leading", 1)] = (shape, ("leading_layers", *names[1:]))
    if config.has_output_layer and not config.tie_embeddings:
        rows["output"] = ((config.output_width, vocab_size), ("embed", "vocab"))
    if config.has_output_layer and config.output_bias:
        rows["output_bias"] = ((vocab_size,), ("vocab",))
    if config.head is not None:
        labels = (config.head.num_labels or num_outputs) if config.head.has_labels else None
        rows |= head_rows(config, vocab_size=vocab_size, num_labels=labels)
    return rows


def head_rows(config: TransformerConfig, *, vocab_size: int, num_labels: int | None) -> Rows:
    """The parameters of a model's head."""
    head, norm, wide, rows = config.head, head_norm_name(config), ((config.output_width,), ("embed",)), Rows()
    assert head is not None
    for name, one in head_shapes(config, num_labels).items():
        rows |= _linear(f"head/{name}", one, bias=head.bias is True or (name == "output" and bool(head.bias)))
        if head.bias is True and name != "output":
            rows[f"head/{name}/bias"] = wide
    if norm is not None:
        rows[f"head/{norm}/scale"] = wide
        if head.bias is True and config.norm == "layernorm":
            rows[f"head/{norm}/bias"] = wide
    if head.kind == "masked_language_model" and head.bias:
        rows["head/bias"] = ((vocab_size,), ("vocab",))
    return rows


def _vit(config: ViTConfig, input_shape: tuple[int, ...], num_classes: int) -> Rows:
    image_size, channels = image_sizes(config, input_shape)
    width, blocks = config.embed_dim, config.blocks(image_size)
    rows = _linear("patches", patch_shape(config, channels), bias=config.outer_bias)
    if config.embedding_norm:
        rows |= _norm("embedding_norm", blocks)
    if config.pooling == "first":
        rows["class_token"] = ((width,), ("embed",))
    rows["positions"] = ((blocks.max_sequence_length, width), (None, "embed"))
    return rows | _stack(blocks) | head_rows(blocks, vocab_size=1, num_labels=num_classes)


def clip_image(config: CLIPConfig) -> tuple[int, int, int]:
    """Height, width and channels of the images that a CLIP takes."""
    return config.image.image_size, config.image.image_size, config.image.channels


def _clip(config: CLIPConfig) -> Rows:
    """Two encoders, and the logarithm of what multiplies their similarities."""
    sides = {
        "image": _vit(config.image_tower, clip_image(config), config.projection_dim),
        "text": _transformer(config.text_tower, config.text.vocab_size, config.projection_dim),
    }
    rows = {f"{side}/{path}": row for side, rows in sides.items() for path, row in rows.items()}
    return rows | {"logit_scale": ((), None)}


def _encoder_decoder(config: EncoderDecoderConfig, vocab_size: int) -> Rows:
    """Two stacks, of which the decoder's has cross-attention."""
    decoder = _stack(config.decoder_stack)
    rows: Rows = {"embedding": ((vocab_size, config.embed_dim), ("vocab", "embed"))}
    rows |= {f"encoder/{path}": row for path, row in _stack(config.encoder_stack).items()}
    rows |= {f"decoder/{path}": row for path, row in decoder.items()}
    for path, row in decoder.items():
        if path.startswith("blocks/attention"):  # its norm too
            rows["decoder/" + path.replace("attention", "cross_attention", 1)] = row
    if not config.tie_embeddings:
        rows["output"] = ((config.embed_dim, vocab_size), ("embed", "vocab"))
    return rows


def _resnet(config: ResNetConfig, channels: int, num_classes: int) -> Tensors:
    """Input channels are sharded over fsdp and output channels over tensor; the stem has too few inputs for that."""
    rows, state = Rows(), Shapes()

    def normed(path: str, norm: str, shape: ConvShape, lead: tuple[int, ...]) -> None:
        name = ("layers",) if lead else ()
        inputs = None if path == "stem" else "channels_in"
        rows[f"{path}/kernel"] = ((*lead, *shape.kernel), (*name, None, None, inputs, "channels_out"))
        for part in ("scale", "bias"):
            rows[f"{norm}/{part}"] = ((*lead, shape.outputs), ("layers", "channels_in") if lead else None)
        for part in ("mean", "variance"):
            state[f"{norm}/{part}"] = (*lead, shape.outputs)

    def block(path: str, shape: ResidualBlockShape, *lead: int) -> None:
        for index, conv in enumerate(shape.convs):
            normed(f"{path}/convs/{index}", f"{path}/norms/{index}", conv, lead)
        if shape.shortcut is not None:
            normed(f"{path}/shortcut", f"{path}/shortcut_norm", shape.shortcut, lead)

    normed("stem", "stem_norm", stem_shape(config, channels), ())
    stages = resnet_stages(config)
    for number, stage in enumerate(stages):
        block(f"stage{number}_first", stage.first)
        if stage.num_rest:
            block(f"stage{number}_rest", stage.rest, stage.num_rest)
    rows["head_kernel"] = ((stages[-1].outputs, num_classes), ("channels_in", None))
    rows["head_bias"] = ((num_classes,), None)
    return _tensors(rows, model_state=state)


OF_BLOCKS = (TransformerConfig, EncoderDecoderConfig, ViTConfig, CLIPConfig)
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
        return "" if self.path == "blocks" else f"{self.path.partition('/')[0]} "

    @property
    def is_leading(self) -> bool:
        """Whether it runs before the stack that a pipeline deals out, on the first stage."""
        return self.path == "leading"


@dataclass(frozen=True)
class OuterLayer:
    """A linear layer before or after the stacks."""

    path: str  # of its kernel
    inputs: int
    outputs: int
    positions: int  # of a row that it is applied to


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
            length, ids = input_shape[0], vocab_size if config.has_output_layer else None
            head = () if config.head is None else _head_layers(config, num_outputs, length)
            head += () if ids is None else (_vocabulary_layer(config, config.output_width, ids, length),)
            first, path = embedding_projection_shape(config), "embedding_projection/kernel"
            entry = () if first is None else (OuterLayer(path, config.table_width, config.embed_dim, length),)
            leading = () if config.leading is None else (Stack("leading", config.leading, length),)
            return Structure((*leading, Stack("blocks", config, length)), entry, head, ids)
        case EncoderDecoderConfig():
            assert vocab_size is not None
            length = input_shape[0]
            written = decoder_length or length
            stacks = (
                Stack("encoder/blocks", config.encoder_stack, length),
                Stack("decoder/blocks", config.decoder_stack, written, length),
            )
            head = (_vocabulary_layer(config, config.embed_dim, vocab_size, written),)
            return Structure(stacks, (), head, vocab_size)
        case ViTConfig():
            image_size, channels = image_sizes(config, input_shape)
            width, tokens = config.embed_dim, config.num_tokens(image_size)
            inputs, patches = config.patch_size**2 * channels, tokens - (config.pooling == "first")
            entry = (OuterLayer("patches/kernel", inputs, width, patches),)
            blocks = config.blocks(image_size)
            head = _head_layers(blocks, config.num_classes or num_outputs, tokens)
            return Structure((Stack("blocks", blocks, tokens),), entry, head, None)
        case CLIPConfig():
            towers = {
                "image": structure_of(config.image_tower, input_shape=clip_image(config), **_NO_DATA),
                "text": structure_of(config.text_tower, input_shape=(config.text.max_sequence_length,), **_NO_DATA),
            }

            def both(name: str) -> tuple[Any, ...]:
                found = ((side, one) for side, tower in towers.items() for one in getattr(tower, name))
                return tuple(replace(one, path=f"{side}/{one.path}") for side, one in found)

            return Structure(both("stacks"), both("entry"), both("head"), None)
        case _:
            return None


_NO_DATA = dict(vocab_size=None, num_outputs=None)


def _vocabulary_layer(
    config: TransformerConfig | EncoderDecoderConfig, width: int, vocab_size: int, positions: int
) -> OuterLayer:
    """The layer whose outputs are logits of the vocabulary."""
    path = "embedding" if config.tie_embeddings else "output"
    return OuterLayer(path, width, vocab_size, positions)


def _head_layers(config: TransformerConfig, num_outputs: int | None, length: int) -> tuple[OuterLayer, ...]:
    """The linear layers of a head after the blocks."""
    head = config.head
    assert head is not None
    layers = head_shapes(config, (head.num_labels or num_outputs) if head.has_labels else None)
    positions = 1 if head.is_pooled else length
    width = config.embed_dim
    return tuple(OuterLayer(f"head/{name}/kernel", width, one.outputs[0], positions) for name, one in layers.items())
