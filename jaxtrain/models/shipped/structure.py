"""Stacks of transformer blocks and the layers around them: what the FLOP count and the planner know of a model.

No jax here.
"""

import math
from dataclasses import dataclass

from jaxtrain.config.model import EncoderDecoderConfig, ModelConfig, TransformerConfig, ViTConfig, image_sizes
from jaxtrain.models.shipped.shapes import head_shapes, patch_shape

OF_BLOCKS = (TransformerConfig, EncoderDecoderConfig, ViTConfig)
"""Configs of models of transformer blocks."""


@dataclass(frozen=True)
class Stack:
    """Equal blocks.

    Attributes:
        path: of their parameters.
        blocks: what they are; what the config says of embeddings and head means nothing.
        length: positions of a row.
        memory_length: positions of another stack's output that each block attends to besides; None: it does not.
    """

    path: str
    blocks: TransformerConfig
    length: int
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
    """A model of transformer blocks.

    Attributes:
        stacks: in the order in which they run.
        entry: linear layers before the first stack.
        head: linear layers after the last stack, in their order.
        vocabulary: ids of which the last layer of the head gives a logit for each position; None: it gives none.
    """

    stacks: tuple[Stack, ...]
    entry: tuple[OuterLayer, ...]
    head: tuple[OuterLayer, ...]
    vocabulary: int | None


def structure_of(
    config: ModelConfig,
    *,
    input_shape: tuple[int, ...],
    vocab_size: int | None,
    num_outputs: int | None,
    decoder_length: int | None = None,
) -> Structure | None:
    """The structure of a model; None for one without transformer blocks.

    Args:
        config: the model.
        input_shape: of one row, without the batch.
        vocab_size: ids of the vocabulary, of a model of tokens.
        num_outputs: classes or targets of the data, which a head takes where the config names none.
        decoder_length: tokens of a row of an encoder-decoder's output; None: as many as the input has.
    """
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
