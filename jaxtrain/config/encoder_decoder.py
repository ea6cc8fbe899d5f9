"""Settings of the encoder-decoder: two stacks of the transformer's block, as in T5."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxtrain.config.numbers import Epsilon, Fraction, Ids, Layers, Length, Scale, TokenId, Units, Width
from jaxtrain.config.published import Published
from jaxtrain.config.sizes import fill_size
from jaxtrain.config.transformer import TransformerConfig
from jaxtrain.published.families.table import sizes_of

ENCODER_DECODER_SIZES = sizes_of("encoder_decoder")


class EncoderDecoderConfig(Published):
    """An encoder that reads a text, and a decoder that writes another one: the families of T5 and Flan-T5."""

    kind: Literal["encoder_decoder"] = "encoder_decoder"
    """Which model this group describes."""
    size: str | None = None
    """Published size that gives the values of the keys below that are not set (t5_small, flan_t5_base, ...)."""
    num_layers: Layers = 6
    """Number of equal blocks of the encoder, whose parameters are stacked."""
    num_decoder_layers: Layers | None = None
    """Number of equal blocks of the decoder; null: as many as the encoder has."""
    embed_dim: Width = 384
    """Width of the residual streams."""
    num_heads: Units = 6
    """Number of query heads."""
    num_kv_heads: Units | None = None
    """Number of key and value heads (grouped-query attention); null: as many as query heads."""
    head_dim: Width | None = None
    """Width of a head; null: embed_dim / num_heads."""
    mlp_dim: Width | None = None
    """Hidden width of the MLP; null: 4 x embed_dim."""
    vocab_size: Ids | None = None
    """Number of token ids in the embedding, which both sides share; null: the vocabulary of the data."""
    max_sequence_length: Length = 512
    """Longest input, and longest output, that the model accepts, in tokens."""
    position: Literal["relative", "rotary", "none"] = "relative"
    """Positions: biases by distance (T5), rotation of queries and keys, or none."""
    relative_buckets: Annotated[int, Field(ge=4, le=2**16)] = 32
    """Number of buckets of distances that share a bias."""
    relative_max_distance: Length = 128
    """Distance from which on all keys share a bucket."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """Normalization in the blocks and after the last one of each side."""
    norm_epsilon: Epsilon = 1e-6
    """Added to the variance in each normalization."""
    attention_scale: Scale | None = None
    """Factor of the attention scores (T5: 1); null: 1 / sqrt(head_dim)."""
    activation: Literal["gelu", "gelu_exact", "relu", "swiglu", "geglu"] = "geglu"
    """Nonlinearity of the MLP (gelu and geglu in the tanh form of GPT-2, gelu_exact by the error function)."""
    tie_embeddings: bool = False
    """Use the embedding as the output layer."""
    logits_scale: Scale | None = None
    """Factor of the logits (T5 with tied embeddings: 1 / sqrt(embed_dim)); null: 1."""
    bias: bool = False
    """Add biases to linear layers and LayerNorm."""
    dropout: Fraction = 0.0
    """Dropout rate of the embeddings and of the outputs of attention and MLP."""
    start_token: TokenId = 0
    """Token before the first one that the decoder writes (T5: 0, its padding); that of the data (decoder_start)."""
    attention: Literal["auto", "cudnn", "splash", "blockwise", "reference"] = "auto"
    """Implementation of self-attention; auto: the first of the platform's table that takes the case (docs/attention.md)."""  # noqa: E501

    @property
    def decoder_layers(self) -> int:
        """Blocks of the decoder, with the default of `num_decoder_layers` filled in."""
        return self.num_decoder_layers or self.num_layers

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
        """Hidden width of the MLP, with the default of `mlp_dim` filled in."""
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def encoder_stack(self) -> TransformerConfig:
        """The blocks of the encoder, as those of a transformer."""
        return self._stack(self.num_layers, causal=False)

    @property
    def decoder_stack(self) -> TransformerConfig:
        """The blocks of the decoder, as those of a transformer; each has cross-attention besides."""
        return self._stack(self.decoder_layers, causal=True)

    def _stack(self, num_layers: int, *, causal: bool) -> TransformerConfig:
        return TransformerConfig(
            num_layers=num_layers,
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            mlp_dim=self.mlp_dim,
            vocab_size=self.vocab_size,
            max_sequence_length=self.max_sequence_length,
            position=self.position,
            relative_buckets=self.relative_buckets,
            relative_max_distance=self.relative_max_distance,
            norm=self.norm,
            norm_epsilon=self.norm_epsilon,
            attention_scale=self.attention_scale,
            activation=self.activation,
            bias=self.bias,
            dropout=self.dropout,
            causal=causal,
            attention=self.attention,
        )

    @model_validator(mode="before")
    @classmethod
    def _from_size(cls, values: object) -> object:
        return fill_size(values, ENCODER_DECODER_SIZES)

    @model_validator(mode="after")
    def _blocks_can_be(self) -> "EncoderDecoderConfig":
        _ = self.encoder_stack  # raises what the transformer's own settings refuse
        if self.vocab_size is not None and self.start_token >= self.vocab_size:
            raise ValueError(f"start_token {self.start_token} is not below vocab_size {self.vocab_size}; lower it")
        return self
