"""Settings of the shipped models.

A model group may name a `size`: that row of the table in `config/sizes.py` gives the value of every key that the user
left out.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxtrain.config.base import Group
from jaxtrain.config.call import Call
from jaxtrain.config.encoder_decoder import EncoderDecoderConfig
from jaxtrain.config.numbers import Finite, Fraction, Ids, PositiveFloat, Units, Width
from jaxtrain.config.published import Published
from jaxtrain.config.sizes import RESNET_SIZES, fill_size
from jaxtrain.config.transformer import TransformerConfig
from jaxtrain.config.vit import ViTConfig

_Blocks = Annotated[int, Field(gt=0, le=500)]


class ResNetConfig(Published):
    """A residual convolutional network for images (He et al. 2015)."""

    kind: Literal["resnet"] = "resnet"
    """Which model this group describes."""
    size: str | None = None
    """Published size that gives the values of the keys below that are not set (resnet18, resnet34, ...)."""
    stage_blocks: Annotated[tuple[_Blocks, ...], Field(strict=False, min_length=1, max_length=8)] = (2, 2, 2, 2)
    """Residual blocks of each stage; each stage after the first halves the image and doubles the width."""
    bottleneck: bool = False
    """Use blocks of three convolutions whose output is four times as wide."""
    width: Units = 64
    """Channels of the first stage."""
    stem: Literal["imagenet", "small"] = "imagenet"
    """imagenet: 7x7 convolution of stride 2 and max-pool; small: 3x3 of stride 1, for images under about 64 pixels."""
    num_classes: Ids | None = None
    """Number of outputs; null: the classes of the data."""
    norm_momentum: Fraction = 0.9
    """Decay of the running batch statistics."""

    @model_validator(mode="before")
    @classmethod
    def _from_size(cls, values: object) -> object:
        return fill_size(values, RESNET_SIZES)


class OutputScale(Group):
    """The units of the numbers that a model gives: output = mean + deviation x that of the last layer."""

    mean: Annotated[tuple[Finite, ...], Field(strict=False, min_length=1)]
    """Of each output, or one for all."""
    deviation: Annotated[tuple[PositiveFloat, ...], Field(strict=False, min_length=1)]
    """Of each output, or one for all."""


class MLPConfig(Group):
    """A multilayer perceptron over flattened inputs."""

    kind: Literal["mlp"] = "mlp"
    """Which model this group describes."""
    hidden_dims: Annotated[tuple[Width, ...], Field(strict=False, max_length=200)] = (256, 256)
    """Widths of the hidden layers."""
    activation: Literal["relu", "gelu"] = "relu"
    """Nonlinearity after each hidden layer."""
    num_outputs: Ids | None = None
    """Number of outputs; null: the classes or target columns of the data."""
    dropout: Fraction = 0.0
    """Dropout rate after each hidden layer."""
    output_scale: OutputScale | None = None
    """Units of the outputs; null: under task=regression those of the targets of a table that is standardized."""


class CalledModel(Call):
    """A model of your own: a function that returns a jaxtrain.Model."""

    kind: Literal["called"] = "called"
    """Which model this group describes."""


ModelConfig = Annotated[
    TransformerConfig | EncoderDecoderConfig | ViTConfig | ResNetConfig | MLPConfig | CalledModel,
    Field(discriminator="kind"),
]
