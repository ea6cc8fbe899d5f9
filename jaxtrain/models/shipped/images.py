"""Models of images: ResNets and vision transformers.

ResNet-18/34/50/101 are of He et al. 2015; the stride of a bottleneck is in its 3x3 convolution, as in torchvision. In a
vision transformer (Dosovitskiy et al. 2020, arXiv 2010.11929) patches take the place of tokens, and the blocks are the
transformer's.

Shapes: B batch, and of images, as in NHWC: H height, W width, C channels; L patches and class token, P pixels of a
patch (its height x its width x C), D model width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.model import ResNetConfig, ViTConfig, image_sizes
from jaxtrain.config.schema import Remat
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import constrain
from jaxtrain.models.from_nnx import from_nnx, from_stages, make_stack, scan_stack
from jaxtrain.models.initializers import INIT_STDDEV, fan_in_normal, normal
from jaxtrain.models.layers import Linear, dropout
from jaxtrain.models.model import DrawsByRow, Model
from jaxtrain.models.shipped.block import RESIDUAL, Block, Context, block_norm
from jaxtrain.models.shipped.heads import PooledHead, head_inputs
from jaxtrain.models.shipped.shapes import (
    ConvShape,
    ResidualBlockShape,
    model_tensors,
    patch_shape,
    resnet_stages,
    size_of,
    stem_shape,
)
from jaxtrain.ops.elementwise import aligned
from jaxtrain.ops.images import batch_norm, convolve, max_pool, normalise, normalise_and_convolve
from jaxtrain.remat.policy import KEEP_ALL

# Decay of the running batch statistics.
_NORM_MOMENTUM = 0.9
_BATCH = ("batch", None, None, None)


class Conv(nnx.Module):
    """A convolution without bias and with 'same' padding."""

    def __init__(self, shape: ConvShape, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(fan_in_normal(2.0)(rngs.params(), shape.kernel, jnp.float32))
        self.stride = shape.stride

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        return convolve(x_BHWC, self.kernel[...], stride=self.stride)


class BatchNorm(nnx.Module):
    """Batch norm: each channel is normalised by its mean and variance over the global batch, in float32."""

    def __init__(self, channels: int, *, zero_scale: bool = False):
        self.scale = nnx.Param(jnp.full((channels,), 0.0 if zero_scale else 1.0, jnp.float32))
        self.bias = nnx.Param(jnp.zeros((channels,), jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros((channels,), jnp.float32))
        self.variance = nnx.BatchStat(jnp.ones((channels,), jnp.float32))

    def __call__(self, x_BHWC: jax.Array, *, train: bool) -> jax.Array:
        scale, bias = self._scale_and_bias()
        if not train:
            return normalise(x_BHWC, self.mean[...], self.variance[...], scale, bias)
        y, mean, variance = batch_norm(x_BHWC, scale, bias)
        self._update(mean, variance, x_BHWC.size // x_BHWC.shape[-1])
        return y

    def then_convolve(self, x_BHWC: jax.Array, conv: Conv, *, train: bool) -> jax.Array:
        """Normalise, set negative numbers to zero, and convolve."""
        if not train:
            return conv(jax.nn.relu(self(x_BHWC, train=False)))
        scale, bias = self._scale_and_bias()
        y, mean, variance = normalise_and_convolve(x_BHWC, scale, bias, conv.kernel[...], stride=conv.stride)
        self._update(mean, variance, x_BHWC.size // x_BHWC.shape[-1])
        return y

    def _scale_and_bias(self) -> tuple[jax.Array, jax.Array]:
        return self.scale[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)

    def _update(self, mean: jax.Array, variance: jax.Array, count: int) -> None:
        unbiased = variance * (count / max(count - 1, 1))
        self.mean[...] = _NORM_MOMENTUM * self.mean[...] + (1 - _NORM_MOMENTUM) * mean
        self.variance[...] = _NORM_MOMENTUM * self.variance[...] + (1 - _NORM_MOMENTUM) * unbiased


class ResidualBlock(nnx.Module):
    """Two 3x3 convolutions, or 1x1, 3x3 and 1x1 ones (bottleneck), whose output is added to a shortcut."""

    def __init__(self, shape: ResidualBlockShape, *, rngs: nnx.Rngs):
        self.convs, self.norms = nnx.List([]), nnx.List([])
        for conv in shape.convs:
            self.convs.append(Conv(conv, rngs=rngs))
            # A block starts as the identity (Goyal et al. 2017, section 5.1).
            self.norms.append(BatchNorm(conv.outputs, zero_scale=conv is shape.convs[-1]))
        self.shortcut = None if shape.shortcut is None else Conv(shape.shortcut, rngs=rngs)
        self.shortcut_norm = None if shape.shortcut is None else BatchNorm(shape.shortcut.outputs)

    def __call__(self, x_BHWC: jax.Array, *, train: bool) -> jax.Array:
        y = self.convs[0](x_BHWC)
        for norm, conv in zip(list(self.norms)[:-1], list(self.convs)[1:], strict=True):
            y = norm.then_convolve(y, conv, train=train)
        y = self.norms[-1](y, train=train)
        if self.shortcut is not None and self.shortcut_norm is not None:
            x_BHWC = self.shortcut_norm(self.shortcut(x_BHWC), train=train)
        return constrain(jax.nn.relu(x_BHWC + y), *_BATCH)


class ResNet(nnx.Module):
    """A stem, stages of residual blocks, the mean over all positions, and a linear head.

    The first block of a stage changes the shape; the equal blocks after it are stacked and scanned.
    """

    def __init__(self, config: ResNetConfig, channels: int, num_classes: int, remat: Remat, rngs: nnx.Rngs):
        stages = resnet_stages(config)
        self.stem = Conv(stem_shape(config, channels), rngs=rngs)
        self.stem_norm = BatchNorm(config.width)
        for number, stage in enumerate(stages):
            setattr(self, f"stage{number}_first", ResidualBlock(stage.first, rngs=rngs))
            if stage.num_rest:

                def make(rngs: nnx.Rngs, shape: ResidualBlockShape = stage.rest) -> ResidualBlock:
                    return ResidualBlock(shape, rngs=rngs)

                setattr(self, f"stage{number}_rest", make_stack(make, stage.num_rest, rngs))
        shape = (stages[-1].outputs, num_classes)
        self.head_kernel = nnx.Param(fan_in_normal(1.0)(rngs.params(), shape, jnp.float32))
        self.head_bias = nnx.Param(jnp.zeros((num_classes,), jnp.float32))
        self.config, self.remat = config, remat

    def __call__(self, x_BHWC: jax.Array, *, train: bool) -> jax.Array:
        def call(block: ResidualBlock, x: jax.Array, index: jax.Array, _: None) -> tuple[jax.Array, None]:
            return block(x, train=train), None

        x = constrain(x_BHWC, *_BATCH)
        with jax.named_scope("stem"):
            x = jax.nn.relu(self.stem_norm(self.stem(x), train=train))
            if self.config.stem == "imagenet":
                x = max_pool(x)
        for stage, count in enumerate(self.config.stage_blocks):
            with jax.named_scope(f"stage{stage}"):
                x = getattr(self, f"stage{stage}_first")(x, train=train)
                if count > 1:
                    path = f"stage{stage}_rest"
                    x, _ = scan_stack(getattr(self, path), call, x, path=path, remat=self.remat)
        with jax.named_scope("head"):
            x_BC = jnp.mean(x.astype(jnp.float32), axis=(1, 2)).astype(x.dtype)
            return x_BC @ self.head_kernel[...] + aligned(self.head_bias[...], x_BC)


def resnet(
    config: ResNetConfig,
    *,
    input_shape: tuple[int, ...],
    vocab_size: int | None = None,
    num_outputs: int | None = None,
    remat: Remat | None = None,
) -> Model:
    """Make a ResNet as a `Model`, which maps float images [B, H, W, C] to logits [B, num_classes]."""
    classes = size_of("num_classes", config.num_classes, num_outputs)
    if len(input_shape) != 3:
        raise ConfigError(f"model.kind=resnet takes images, but a row of the data has shape {input_shape}")

    def make(rngs: nnx.Rngs) -> ResNet:
        return ResNet(config, input_shape[-1], classes, remat or KEEP_ALL, rngs)

    def call(module: Any, inputs: Any, key: Any, train: bool) -> jax.Array:
        return module(inputs, train=train)

    rest = tuple(f"stage{stage}_rest" for stage in range(len(config.stage_blocks)))
    axes = model_tensors(config, input_shape=input_shape, num_outputs=classes).axes
    model = from_nnx(make, axes=axes, call=call, name=config.size or "resnet", gathers_itself=rest)
    return dataclasses.replace(model, num_outputs=classes, convolutional=True)


class ViT(nnx.Module):
    """Patches, positions, stacked blocks, norm and head."""

    def __init__(self, config: ViTConfig, image_size: int, channels: int, num_classes: int, rngs: nnx.Rngs):
        blocks, init = config.blocks(image_size), normal(INIT_STDDEV)
        shape, width = patch_shape(config, channels), config.embed_dim
        self.patches = Linear(
            shape.inputs, shape.outputs, bias=config.outer_bias, initializer=init, rngs=rngs, low_precision=False
        )
        first = config.pooling == "first"
        self.class_token = nnx.Param(jnp.zeros((width,), jnp.float32)) if first else None
        self.positions = nnx.Param(init(rngs.params(), (blocks.max_sequence_length, width), jnp.float32))
        self.embedding_norm = block_norm(blocks) if config.embedding_norm else None
        self.blocks = make_stack(lambda rngs: Block(blocks, rngs), config.num_layers, rngs)
        self.output_norm = block_norm(blocks)
        self.head = PooledHead(blocks, num_classes, rngs)
        self.config = config

    def embed(self, images_BHWC: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map each patch to a vector, put the class token before them, and add positions: [B, L, D]."""
        side = self.config.patch_size
        rows, height, width, channels = images_BHWC.shape
        with jax.named_scope("embed"):
            x = images_BHWC.reshape(rows, height // side, side, width // side, side, channels)
            x_BLP = x.transpose(0, 1, 3, 2, 4, 5).reshape(rows, -1, side * side * channels)
            x_BLD = self.patches(x_BLP)
            if self.class_token is not None:
                token_B1D = jnp.broadcast_to(self.class_token[...], (rows, 1, x_BLD.shape[-1]))
                x_BLD = jnp.concatenate([token_B1D, x_BLD], axis=1)
            x_BLD = x_BLD + aligned(self.positions[...], x_BLD)
            if self.embedding_norm is not None:
                x_BLD = self.embedding_norm(x_BLD)
            return constrain(dropout(x_BLD, self.config.dropout, key), *RESIDUAL)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Apply the final norm and the head: [B, classes]."""
        with jax.named_scope("output"):
            x_BLD = self.output_norm(x_BLD)
            # The mean counts every patch, and the head has no dropout: a head needs nothing else of the inputs.
            weights = head_inputs(self.config.head, (x_BLD.shape[0], x_BLD.shape[1]), None, None)
            return self.head(x_BLD, weights)


def vit(
    config: ViTConfig,
    *,
    input_shape: tuple[int, ...],
    vocab_size: int | None = None,
    num_outputs: int | None = None,
    remat: Remat | None = None,
) -> Model:
    """Make a vision transformer as a `Model`, which maps float images [B, H, W, C] to logits [B, num_classes]."""
    classes = size_of("num_classes", config.num_classes, num_outputs)
    image_size, channels = image_sizes(config, input_shape)
    blocks = config.blocks(image_size)

    def make(rngs: nnx.Rngs) -> ViT:
        return ViT(config, image_size, channels, classes, rngs)

    def block(block: Block, x_BLD: Any, inputs: Any, key: jax.Array | None, train: bool) -> jax.Array:
        positions_BL = jnp.arange(blocks.max_sequence_length)[None]
        return block(x_BLD, Context(positions_BL), key if train else None)[0]

    built = from_stages(
        make,
        stack="blocks",
        embed=DrawsByRow(lambda module, inputs, key, train: module.embed(inputs, key if train else None)),
        block=DrawsByRow(block),
        head=lambda module, x_BLD, train: module.logits(x_BLD),
        axes=model_tensors(config, input_shape=input_shape, num_outputs=classes).axes,
        remat=remat,
        name=config.size or "vit",
    )
    return dataclasses.replace(built, num_outputs=classes)
