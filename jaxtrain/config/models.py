"""Settings of the shipped models, and the published sizes as one table.

A model group may name a `size`: that row of the table gives the value of every key that the user left out.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from jaxtrain.config.base import Group
from jaxtrain.config.call import Call
from jaxtrain.published.families.table import sizes_of

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0)]
StepCount = Annotated[int, Field(ge=0)]

_GPT = dict(
    vocab_size=50257, max_sequence_length=1024, position="learned", norm="layernorm",
    activation="gelu", tie_embeddings=True, bias=True, norm_epsilon=1e-5,
)  # fmt: skip
_GPT3 = _GPT | dict(max_sequence_length=2048)
_MIXTRAL = dict(
    vocab_size=32000, max_sequence_length=32768, position="rotary", rope_theta=1e6, norm="rmsnorm",
    norm_epsilon=1e-5, activation="swiglu", tie_embeddings=False, bias=False, num_kv_heads=8, head_dim=128,
    experts=dict(num_experts=8, experts_per_token=2),
)  # fmt: skip


# Key of a model group -> value.
Size = dict[str, object]


def _row(family: Mapping[str, object], layers: int, width: int, heads: int, **more: object) -> Size:
    return {**family} | dict(num_layers=layers, embed_dim=width, num_heads=heads) | more


# Sources: GPT-2, Radford et al. 2019 (openai/gpt-2 hparams); GPT-3, Brown et al. 2020, table 2.1 (its 13B row is
# 5140 wide with 40 heads of 128, so num_heads x head_dim is not the width; all layers have dense attention here);
# Mixtral v0.1 (the base models): the config.json published with each model.
TRANSFORMER_SIZES: dict[str, Size] = {
    "gpt2": _row(_GPT, 12, 768, 12),
    "gpt2_medium": _row(_GPT, 24, 1024, 16),
    "gpt2_large": _row(_GPT, 36, 1280, 20),
    "gpt2_xl": _row(_GPT, 48, 1600, 25),
    "gpt3_125m": _row(_GPT3, 12, 768, 12),
    "gpt3_350m": _row(_GPT3, 24, 1024, 16),
    "gpt3_760m": _row(_GPT3, 24, 1536, 16),
    "gpt3_1.3b": _row(_GPT3, 24, 2048, 24, head_dim=128),
    "gpt3_2.7b": _row(_GPT3, 32, 2560, 32),
    "gpt3_6.7b": _row(_GPT3, 32, 4096, 32),
    "gpt3_13b": _row(_GPT3, 40, 5140, 40, head_dim=128),
    "gpt3_175b": _row(_GPT3, 96, 12288, 96),
    **sizes_of("transformer"),
    "mixtral_8x7b": _row(_MIXTRAL, 32, 4096, 32, mlp_dim=14336),
    "mixtral_8x22b": _row(_MIXTRAL, 56, 6144, 48, mlp_dim=16384, max_sequence_length=65536),
}

# Source: He et al. 2015, table 1; models of 50 layers or more have bottleneck blocks.
RESNET_SIZES: dict[str, Size] = {
    "resnet18": dict(stage_blocks=[2, 2, 2, 2], bottleneck=False),
    "resnet34": dict(stage_blocks=[3, 4, 6, 3], bottleneck=False),
    "resnet50": dict(stage_blocks=[3, 4, 6, 3], bottleneck=True),
    "resnet101": dict(stage_blocks=[3, 4, 23, 3], bottleneck=True),
}


def _fill(values: object, sizes: Mapping[str, Size]) -> object:
    """Returns the values with those of the named size where the user gave none."""
    if not isinstance(values, dict) or not isinstance(values.get("size"), str):
        return values
    if values["size"] not in sizes:
        raise PydanticCustomError("unknown_size", "unknown size; known: {expected}", {"expected": ", ".join(sizes)})
    return sizes[values["size"]] | values


class RopeScaling(Group):
    """Frequency scaling of rotary positions for long contexts (Llama 3.1)."""

    factor: Annotated[float, Field(ge=1)]
    """Low frequencies are divided by this."""
    low_frequency_factor: float = 1.0
    """Frequencies with wavelengths above original_length / low_frequency_factor are divided by factor."""
    high_frequency_factor: float = 4.0
    """Frequencies with wavelengths below original_length / high_frequency_factor are not scaled."""
    original_length: PositiveInt = 8192
    """Sequence length that the model was first trained at."""


class ExpertsConfig(Group):
    """A mixture of experts in place of each block's MLP; every expert is an MLP of width mlp_dim."""

    num_experts: PositiveInt = 8
    """Number of experts in each block."""
    experts_per_token: PositiveInt = 2
    """Number of experts that the router chooses for each token."""
    load_balance_weight: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the loss that makes the experts process equal numbers of tokens."""
    router_z_weight: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the loss that keeps the router's logits small."""

    @model_validator(mode="after")
    def _enough(self) -> "ExpertsConfig":
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than num_experts {self.num_experts}; lower it"
            )
        return self


class TransformerConfig(Group):
    """A decoder transformer: the GPT-2/GPT-3, Llama-3 and Mixtral families."""

    kind: Literal["transformer"] = "transformer"
    """Which model this group describes."""
    size: str | None = None
    """Published size that gives the values of the keys below that are not set (gpt2, llama3.1_8b, ...)."""
    num_layers: PositiveInt = 6
    """Number of equal blocks, whose parameters are stacked."""
    embed_dim: PositiveInt = 384
    """Width of the residual stream."""
    num_heads: PositiveInt = 6
    """Number of query heads."""
    num_kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped-query attention); null: as many as query heads."""
    head_dim: PositiveInt | None = None
    """Width of a head; null: embed_dim / num_heads."""
    mlp_dim: PositiveInt | None = None
    """Hidden width of the MLP, or of each expert; null: 4 x embed_dim."""
    experts: ExpertsConfig | None = None
    """Mixture of experts in place of the MLP; null: one MLP for all tokens."""
    vocab_size: PositiveInt | None = None
    """Number of token ids in the embedding; null: the vocabulary of the data."""
    max_sequence_length: PositiveInt = 256
    """Longest sequence that the model accepts, in tokens; with learned positions, also their number."""
    position: Literal["learned", "rotary"] = "rotary"
    """Position encoding: learned embeddings, or rotation of queries and keys."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of rotary frequencies for long contexts; null: no scaling."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """Normalization before attention, MLP and output layer."""
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the variance in each normalization."""
    activation: Literal["gelu", "swiglu"] = "swiglu"
    """Nonlinearity of the MLP (gelu in its tanh approximation, as in GPT-2)."""
    tie_embeddings: bool = False
    """Use the embedding as the output layer."""
    bias: bool = False
    """Add biases to linear layers and LayerNorm."""
    dropout: Fraction = 0.0
    """Dropout rate of the embeddings and of the outputs of attention and MLP."""
    causal: bool = True
    """Each position attends to itself and earlier ones; false: to all (an encoder, for tasks and data of your own)."""
    sliding_window: PositiveInt | None = None
    """Attend to this many positions back, the own one counted, and as many ahead if not causal; null: to all."""
    attention_softcap: Annotated[float, Field(gt=0)] | None = None
    """Bound c of the attention scores s, computed as c tanh(s / c) (Gemma 2); null: no bound."""
    attention: Literal["auto", "cudnn", "splash", "blockwise", "reference"] = "auto"
    """Implementation of attention; auto: the first of the platform's table that takes the case (docs/attention.md)."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads, with the default of `num_kv_heads` filled in."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """Width of a head, with the default of `head_dim` filled in."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP or of each expert, with the default of `mlp_dim` filled in."""
        return self.mlp_dim or 4 * self.embed_dim

    @model_validator(mode="before")
    @classmethod
    def _from_size(cls, values: object) -> object:
        return _fill(values, TRANSFORMER_SIZES)

    @model_validator(mode="after")
    def _heads(self) -> "TransformerConfig":
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim {self.embed_dim} is not a multiple of num_heads {self.num_heads}; set head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.position == "rotary" and self.head_width % 2:
            raise ValueError(
                f"head_dim {self.head_width} is odd, but rotary positions rotate pairs of numbers; set head_dim to "
                "an even number, or position: learned"
            )
        return self

    @model_validator(mode="after")
    def _experts_without_bias(self) -> "TransformerConfig":
        if self.experts is not None and self.bias:
            raise ValueError("experts have no biases; set bias: false, or leave experts out")
        return self


class ResNetConfig(Group):
    """A residual convolutional network for images (He et al. 2015)."""

    kind: Literal["resnet"] = "resnet"
    """Which model this group describes."""
    size: str | None = None
    """Published size that gives the values of the keys below that are not set (resnet18, resnet34, ...)."""
    stage_blocks: Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1)] = (2, 2, 2, 2)
    """Residual blocks of each stage; each stage after the first halves the image and doubles the width."""
    bottleneck: bool = False
    """Use blocks of three convolutions whose output is four times as wide."""
    width: PositiveInt = 64
    """Channels of the first stage."""
    stem: Literal["imagenet", "small"] = "imagenet"
    """imagenet: 7x7 convolution of stride 2 and max-pool; small: 3x3 of stride 1, for images under about 64 pixels."""
    num_classes: PositiveInt | None = None
    """Number of outputs; null: the classes of the data."""
    norm_momentum: Fraction = 0.9
    """Decay of the running batch statistics."""

    @model_validator(mode="before")
    @classmethod
    def _from_size(cls, values: object) -> object:
        return _fill(values, RESNET_SIZES)


class MLPConfig(Group):
    """A multilayer perceptron over flattened inputs."""

    kind: Literal["mlp"] = "mlp"
    """Which model this group describes."""
    hidden_dims: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = (256, 256)
    """Widths of the hidden layers."""
    activation: Literal["relu", "gelu"] = "relu"
    """Nonlinearity after each hidden layer."""
    num_outputs: PositiveInt | None = None
    """Number of outputs; null: the classes or target columns of the data."""
    dropout: Fraction = 0.0
    """Dropout rate after each hidden layer."""


class CalledModel(Call):
    """A model of your own: a function that returns a jaxtrain.Model."""

    kind: Literal["called"] = "called"
    """Which model this group describes."""


ModelConfig = Annotated[TransformerConfig | ResNetConfig | MLPConfig | CalledModel, Field(discriminator="kind")]
