"""A vision transformer: patches of an image take the place of tokens, and the blocks are the transformer's.

Source: Dosovitskiy et al. 2020 (arXiv 2010.11929). Shapes: B batch, and of images, as in NHWC: H height, W width, C
channels; L patches and class token, P pixels of a patch (its height x its width x C), D model width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.model import ViTConfig, image_sizes
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import constrain
from jaxtrain.models.initializers import normal
from jaxtrain.models.layers import Linear, dropout
from jaxtrain.models.model import DrawsByRow, Model
from jaxtrain.models.shipped.axes import model_axes
from jaxtrain.models.shipped.block import RESIDUAL, Block, block_norm
from jaxtrain.models.shipped.heads import HeadInputs, PooledHead, head_inputs
from jaxtrain.models.shipped.initial import INIT_STDDEV
from jaxtrain.models.shipped.shapes import patch_shape
from jaxtrain.models.stack import make_stack
from jaxtrain.models.stages import from_stages
from jaxtrain.ops.elementwise import aligned
from jaxtrain.remat.policy import Remat


class ViT(nnx.Module):
    """Patches, positions, stacked blocks, norm and head.

    Args:
        config: sizes and variants.
        image_size: H and W.
        channels: C.
        num_classes: outputs.
        rngs: random streams; `params` draws the kernels.
    """

    def __init__(self, config: ViTConfig, image_size: int, channels: int, num_classes: int, rngs: nnx.Rngs):
        blocks, init = config.blocks(image_size), normal(INIT_STDDEV)
        shape, width = patch_shape(config, channels), config.embed_dim
        self.patches = Linear(shape.inputs, shape.outputs, bias=True, initializer=init, rngs=rngs, low_precision=False)
        first = config.pooling == "first"
        self.class_token = nnx.Param(jnp.zeros((width,), jnp.float32)) if first else None
        self.positions = nnx.Param(init(rngs.params(), (blocks.max_sequence_length, width), jnp.float32))
        self.blocks = make_stack(lambda rngs: Block(blocks, rngs), config.num_layers, rngs)
        self.output_norm = block_norm(blocks)
        self.head = PooledHead(config.head, width, num_classes, rngs)
        self.config = config

    def embed(self, images_BHWC: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map each patch to a vector, put the class token before them, and add positions.

        Args:
            images_BHWC: any float dtype.
            key: for dropout; None: no dropout.

        Returns:
            [B, L, D] in the dtype of the images.
        """
        side = self.config.patch_size
        rows, height, width, channels = images_BHWC.shape
        with jax.named_scope("embed"):
            x = images_BHWC.reshape(rows, height // side, side, width // side, side, channels)
            x_BLP = x.transpose(0, 1, 3, 2, 4, 5).reshape(rows, -1, side * side * channels)
            x_BLD = self.patches(x_BLP)
            if self.class_token is not None:
                token_B1D = jnp.broadcast_to(self.class_token[...], (rows, 1, x_BLD.shape[-1]))
                x_BLD = jnp.concatenate([token_B1D, x_BLD], axis=1)
            x_BLD = dropout(x_BLD + aligned(self.positions[...], x_BLD), self.config.dropout, key)
            return constrain(x_BLD, *RESIDUAL)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Apply the final norm and the head: [B, classes]."""
        with jax.named_scope("output"):
            x_BLD = self.output_norm(x_BLD)
            # The mean counts every patch, and the head has no dropout: a head needs nothing else of the inputs.
            weights = head_inputs(self.config.head, (x_BLD.shape[0], x_BLD.shape[1]), None, None)
            return self.head(x_BLD, HeadInputs(weights.pooling_BL))


def vit(
    config: ViTConfig,
    *,
    input_shape: tuple[int, ...],
    num_classes: int | None = None,
    remat: Remat | None = None,
) -> Model:
    """Make a vision transformer as a `Model`, which maps float images [B, H, W, C] to logits [B, num_classes].

    Args:
        config: sizes and variants.
        input_shape: (H, W, C) of one image.
        num_classes: number of classes, used where the config does not set `num_classes`.
        remat: what the backward pass keeps of the blocks; None: everything.

    Raises:
        ConfigError: the inputs are not images of the size that the config wants, or do not divide into patches, or
            neither the config nor the caller gives the number of classes.
    """
    classes = config.num_classes or num_classes
    if classes is None:
        raise ConfigError("model.num_classes is not set and the data has no classes; set model.num_classes")
    image_size, channels = image_sizes(config, input_shape)
    blocks = config.blocks(image_size)

    def make(rngs: nnx.Rngs) -> ViT:
        return ViT(config, image_size, channels, classes, rngs)

    def embed(module: ViT, inputs: Any, key: jax.Array | None, train: bool) -> jax.Array:
        return module.embed(inputs, key if train else None)

    def block(block: Block, x_BLD: Any, inputs: Any, key: jax.Array | None, train: bool) -> jax.Array:
        positions_BL = jnp.arange(blocks.max_sequence_length)[None]
        return block(x_BLD, positions_BL, None, key if train else None)[0]

    def head(module: ViT, x_BLD: Any, train: bool) -> jax.Array:
        return module.logits(x_BLD)

    built = from_stages(
        make,
        stack="blocks",
        embed=DrawsByRow(embed),
        block=DrawsByRow(block),
        head=head,
        axes=model_axes(config),
        remat=remat,
        name=config.size or "vit",
    )
    return dataclasses.replace(built, num_outputs=classes)
