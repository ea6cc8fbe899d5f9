"""Settings of the vision transformer: the block of the transformer over patches of images."""

from typing import Literal

from pydantic import model_validator

from jaxtrain.config.heads import HeadConfig
from jaxtrain.config.numbers import Epsilon, Fraction, Ids, Layers, Units, Width
from jaxtrain.config.published import Published
from jaxtrain.config.sizes import VIT_SIZES, fill_size
from jaxtrain.config.transformer import TransformerConfig
from jaxtrain.errors import ConfigError


class ViTConfig(Published):
    """A vision transformer, which classifies images (Dosovitskiy et al. 2020)."""

    kind: Literal["vit"] = "vit"
    """Which model this group describes."""
    size: str | None = None
    """Published size that gives the values of the keys below that are not set (vit_base, vit_large, ...)."""
    num_layers: Layers = 12
    """Number of equal blocks, whose parameters are stacked."""
    embed_dim: Width = 192
    """Width of the residual stream."""
    num_heads: Units = 3
    """Number of attention heads."""
    mlp_dim: Width | None = None
    """Hidden width of the MLP; null: 4 x embed_dim."""
    patch_size: Units = 16
    """Height and width of a patch, in pixels."""
    image_size: Units | None = None
    """Height and width of an image, in pixels; null: that of the data."""
    channels: Units | None = None
    """Channels of an image; null: those of the data."""
    num_classes: Ids | None = None
    """Number of outputs; null: the classes of the data."""
    pooling: Literal["first", "mean"] = "first"
    """What stands for the image: a class token that goes before the patches, or the mean of the patches."""
    activation: Literal["gelu", "gelu_exact"] = "gelu_exact"
    """Nonlinearity of the MLP (gelu in the tanh form, gelu_exact by the error function)."""
    norm_epsilon: Epsilon = 1e-6
    """Added to the variance in each LayerNorm."""
    dropout: Fraction = 0.0
    """Dropout rate of the embeddings and of the outputs of attention and MLP."""
    attention: Literal["auto", "cudnn", "splash", "blockwise", "reference"] = "auto"
    """Implementation of attention; auto: the first of the platform's table that takes the case (docs/attention.md)."""

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP, with the default of `mlp_dim` filled in."""
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def head(self) -> HeadConfig:
        """The head that classifies; the mean counts every patch."""
        return HeadConfig(kind="sequence", pooling=self.pooling)

    def num_tokens(self, image_size: int) -> int:
        """Length of the sequence that the blocks see: the patches, and the class token where there is one."""
        return (image_size // self.patch_size) ** 2 + (self.pooling == "first")

    def blocks(self, image_size: int) -> TransformerConfig:
        """The transformer whose blocks these are, for images of this height and width; its vocabulary means nothing."""
        return TransformerConfig(
            num_layers=self.num_layers,
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            mlp_dim=self.mlp_width,
            vocab_size=1,
            max_sequence_length=self.num_tokens(image_size),
            position="learned",
            norm="layernorm",
            norm_epsilon=self.norm_epsilon,
            activation=self.activation,
            bias=True,
            dropout=self.dropout,
            causal=False,
            attention=self.attention,
        )

    @model_validator(mode="before")
    @classmethod
    def _from_size(cls, values: object) -> object:
        return fill_size(values, VIT_SIZES)

    @model_validator(mode="after")
    def _divides(self) -> "ViTConfig":
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim {self.embed_dim} is not a multiple of num_heads {self.num_heads}; change one")
        if self.image_size is not None and self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}; change one"
            )
        return self


def image_sizes(config: ViTConfig, input_shape: tuple[int, ...]) -> tuple[int, int]:
    """Check the images that a vision transformer takes.

    Args:
        config: of the model.
        input_shape: of one row of the data.

    Returns:
        Height and width (which are equal), and channels.

    Raises:
        ConfigError: the rows are no square images, or not of the size that the config wants.
    """
    if len(input_shape) != 3 or input_shape[0] != input_shape[1]:
        raise ConfigError(
            "model.kind=vit takes square images [height, width, channels], but a row of the data has shape "
            f"{list(input_shape)}; use another model or images"
        )
    image_size, channels = input_shape[1:]
    for key, wanted, found in (("image_size", config.image_size, image_size), ("channels", config.channels, channels)):
        if wanted not in (None, found):
            raise ConfigError(
                f"model.{key}={wanted}, but a row of the data has shape {list(input_shape)}; give images of that "
                f"{key.replace('_', ' ')}, or set model.{key}={found}"
            )
    if image_size % config.patch_size:
        raise ConfigError(
            f"images of {image_size} x {image_size} pixels do not divide into patches of model.patch_size="
            f"{config.patch_size}; use a divisor of {image_size}"
        )
    return image_size, channels
