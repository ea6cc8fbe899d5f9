"""Settings of the transformer: one block with orthogonal settings, so that a published family is a row of values."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxtrain.config.base import Group
from jaxtrain.config.heads import HeadConfig
from jaxtrain.config.numbers import (
    Epsilon,
    Fraction,
    Ids,
    Layers,
    Length,
    PositiveFloat,
    PositiveShare,
    Scale,
    Units,
    Weight,
    Width,
)
from jaxtrain.config.published import Published
from jaxtrain.config.rope import AnyRope, LongRope, YarnRope, with_default_kind
from jaxtrain.config.sizes import TRANSFORMER_SIZES, fill_size

# More than all computers of the world hold for one model.
_MOST_PARAMETERS = 10**15

GATED = ("swiglu", "geglu")
"""Activations that multiply the activated gate with a second linear layer."""


class ExpertsConfig(Group):
    """A mixture of experts in place of each block's MLP; every expert is an MLP of width mlp_dim."""

    num_experts: Units = 8
    """Number of experts in each block."""
    experts_per_token: Units = 2
    """Number of experts that the router chooses for each token."""
    load_balance_weight: Weight = 0.01
    """Weight of the loss that makes the experts process equal numbers of tokens."""
    router_z_weight: Weight = 0.001
    """Weight of the loss that keeps the router's logits small."""

    @model_validator(mode="after")
    def _enough(self) -> "ExpertsConfig":
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than num_experts {self.num_experts}; lower it"
            )
        return self


class LocalLayers(Group):
    """Layers whose attention sees a window, between layers that see everything (Gemma 2 and 3)."""

    pattern: Annotated[tuple[Literal[0, 1], ...], Field(strict=False, min_length=1)]
    """1 for a local layer, 0 for a global one; repeated from the first layer to the last."""
    window: Length
    """Positions back that a local layer attends to, the own one counted, and as many ahead if not causal."""
    rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies of local layers, which are not scaled; null: as in the global layers."""


class TransformerConfig(Published):
    """A transformer, as a decoder or as an encoder: the families of GPT, Llama, Qwen, Gemma, Phi, NeoX and BERT."""

    kind: Literal["transformer"] = "transformer"
    """Which model this group describes."""
    size: str | None = None
    """Published size that gives the values of the keys below that are not set (gpt2, llama3.1_8b, ...)."""
    num_layers: Layers = 6
    """Number of equal blocks, whose parameters are stacked."""
    embed_dim: Width = 384
    """Width of the residual stream."""
    num_heads: Units = 6
    """Number of query heads."""
    num_kv_heads: Units | None = None
    """Number of key and value heads (grouped-query attention); null: as many as query heads."""
    head_dim: Width | None = None
    """Width of a head; null: embed_dim / num_heads."""
    mlp_dim: Width | None = None
    """Hidden width of the MLP, or of each expert; null: 4 x embed_dim."""
    experts: ExpertsConfig | None = None
    """Mixture of experts in place of the MLP; null: one MLP for all tokens."""
    vocab_size: Ids | None = None
    """Number of token ids in the embedding; null: the vocabulary of the data."""
    max_sequence_length: Length = 256
    """Longest sequence that the model accepts, in tokens; with learned positions, also their number."""
    position: Literal["learned", "rotary", "relative", "none"] = "rotary"
    """Positions: learned embeddings, rotation of queries and keys, biases by distance (T5), or none."""
    relative_buckets: Annotated[int, Field(ge=4, le=2**16)] = 32
    """Number of buckets of distances, each with a learned bias per head (relative positions)."""
    relative_max_distance: Length = 128
    """Distance from which on all keys share a bucket (relative positions)."""
    position_offset: Annotated[int, Field(ge=0, le=2**16)] = 0
    """Learned embeddings before that of the first position (RoBERTa: 2)."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: AnyRope | None = None
    """Scaling of rotary frequencies for long contexts; null: no scaling."""
    rotary_fraction: PositiveShare = 1.0
    """Share of the dims of a head that are rotated, the first ones (GPT-NeoX: 0.25)."""
    block: Literal["pre", "post", "sandwich", "parallel"] = "pre"
    """Norms of inputs (pre), of sums (post), of inputs and outputs (sandwich); parallel: attention beside MLP."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """Normalization in the blocks and before the output layer."""
    norm_epsilon: Epsilon = 1e-5
    """Added to the variance in each normalization."""
    norm_offset: bool = False
    """Store the scale of each norm less 1 (Gemma)."""
    qk_norm: bool = False
    """Normalize each head's queries and keys before positions are applied (Qwen3, Gemma 3)."""
    attention_scale: Scale | None = None
    """Factor of the attention scores; null: 1 / sqrt(head_dim)."""
    attention_softcap: Scale | None = None
    """Bound c of the attention scores s, computed as c tanh(s / c) (Gemma 2); null: no bound."""
    activation: Literal["gelu", "gelu_exact", "relu", "swiglu", "geglu"] = "swiglu"
    """Nonlinearity of the MLP (gelu and geglu in the tanh form of GPT-2, gelu_exact by the error function)."""
    tie_embeddings: bool = False
    """Use the embedding as the output layer."""
    embedding_scale: Scale | None = None
    """Factor of the token embeddings (Gemma: sqrt(embed_dim)); null: 1."""
    embedding_norm: bool = False
    """Normalize the sum of the embeddings (BERT)."""
    token_types: Annotated[int, Field(ge=0, le=2**16)] = 0
    """Number of learned embeddings of token types (BERT: 2, the two texts of a pair); 0: none."""
    logits_scale: Scale | None = None
    """Factor of the logits; null: 1."""
    logits_softcap: Scale | None = None
    """Bound c of the logits z, computed as c tanh(z / c) (Gemma 2); null: no bound."""
    head: HeadConfig | None = None
    """What the model gives: labels, numbers or an embedding of a text, or masked tokens; null: the next token."""
    bias: bool | Literal["qkv"] = False
    """Add biases to linear layers and LayerNorm; qkv: to queries, keys and values alone (Qwen2)."""
    dropout: Fraction = 0.0
    """Dropout rate of the embeddings and of the outputs of attention and MLP."""
    causal: bool = True
    """Each position attends to itself and earlier ones; false: to all (an encoder)."""
    sliding_window: Length | None = None
    """Attend to this many positions back, the own one counted, and as many ahead if not causal; null: to all."""
    local_layers: LocalLayers | None = None
    """Layers of a sliding window of their own between layers that attend to all; null: all layers are alike."""
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

    @property
    def head_kind(self) -> str:
        """Kind of the head, with the default of `head` filled in."""
        return "language_model" if self.head is None else self.head.kind

    @property
    def has_output_layer(self) -> bool:
        """Whether the model has logits of the vocabulary, by its embedding or by an output layer of its own."""
        return self.head_kind in ("language_model", "masked_language_model")

    @property
    def rotary_dims(self) -> int:
        """Dims of a head that are rotated."""
        return int(self.head_width * self.rotary_fraction)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer's attention, with the pattern of `local_layers` repeated; None: it sees all."""
        if self.local_layers is None:
            return (self.sliding_window,) * self.num_layers
        pattern, window = self.local_layers.pattern, self.local_layers.window
        return tuple(window if pattern[i % len(pattern)] else None for i in range(self.num_layers))

    @model_validator(mode="before")
    @classmethod
    def _from_size(cls, values: object) -> object:
        values = fill_size(values, TRANSFORMER_SIZES)
        if isinstance(values, dict) and "rope_scaling" in values:
            values = values | {"rope_scaling": with_default_kind(values["rope_scaling"])}
        return values

    @model_validator(mode="after")
    def _heads(self) -> "TransformerConfig":
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim {self.embed_dim} is not a multiple of num_heads {self.num_heads}; set head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        return self

    @model_validator(mode="after")
    def _of_a_size(self) -> "TransformerConfig":
        attention = 2 * self.embed_dim * self.head_width * (self.num_heads + self.kv_heads)
        experts = 1 if self.experts is None else self.experts.num_experts
        mlp = 2 * self.embed_dim * self.mlp_width * experts
        count = self.num_layers * (attention + mlp) + (self.vocab_size or 0) * self.embed_dim
        if count > _MOST_PARAMETERS:
            raise ValueError(
                f"the sizes make a model of {count:.1e} parameters; lower num_layers, embed_dim, mlp_dim or experts "
                f"(at most {_MOST_PARAMETERS:.0e} are taken)"
            )
        return self

    @model_validator(mode="after")
    def _relative(self) -> "TransformerConfig":
        if self.position != "relative":
            return self
        parts = 2 if self.causal else 4  # half of the buckets, of each side, hold one distance each
        if self.relative_buckets % parts:
            raise ValueError(f"relative_buckets {self.relative_buckets} is not a multiple of {parts}; use 32")
        exact = self.relative_buckets // parts
        if self.relative_max_distance <= exact:
            raise ValueError(
                f"relative_max_distance {self.relative_max_distance} is not above {exact}, the distances that have a "
                "bucket of their own; raise it, or lower relative_buckets"
            )
        return self

    @model_validator(mode="after")
    def _rotary(self) -> "TransformerConfig":
        if self.position != "rotary":
            return self
        if self.rotary_dims % 2 or not self.rotary_dims:
            share = "" if self.rotary_fraction == 1 else f" x rotary_fraction {self.rotary_fraction}"
            found = f"{self.head_width}{share} is {self.rotary_dims}" if share else f"{self.head_width} is odd"
            raise ValueError(
                f"head_dim {found}, but rotary positions rotate pairs of numbers; set head_dim to "
                "an even number, or position: learned"
            )
        scaling = self.rope_scaling
        if isinstance(scaling, YarnRope) and self.rope_theta <= 1:
            raise ValueError(f"rope_theta {self.rope_theta} is not above 1, which yarn takes; the usual one is 10000")
        if isinstance(scaling, LongRope) and len(scaling.short_factors) != self.rotary_dims // 2:
            raise ValueError(
                f"rope_scaling.short_factors has {len(scaling.short_factors)} entries, but a head has "
                f"{self.rotary_dims // 2} pairs of rotated dims; give one for each"
            )
        return self

    @model_validator(mode="after")
    def _belongs_together(self) -> "TransformerConfig":
        if self.experts is not None and self.bias is True:
            raise ValueError("experts have no biases; set bias: false, or leave experts out")
        if self.experts is not None and self.activation not in ("gelu", "swiglu"):
            raise ValueError(f"experts have activation gelu or swiglu, not {self.activation}; set one of them")
        if self.experts is not None and not self.has_output_layer:
            raise ValueError(
                f"experts have losses per token, which a head of kind {self.head_kind} has no place for; leave experts "
                "out, or set head: null"
            )
        head = self.head
        if head is not None and head.is_pooled and head.pooling == "first" and self.causal:
            raise ValueError(
                "head.pooling=first with causal: true gives what the first token alone says, which sees no other; set "
                "head.pooling: last (or mean), or causal: false"
            )
        if self.head_kind == "masked_language_model" and self.causal:
            raise ValueError(
                "a masked_language_model head with causal: true sees nothing after a masked token; set causal: false"
            )
        if self.local_layers is not None and self.sliding_window is not None:
            raise ValueError("sliding_window is the window of all layers and local_layers that of some; leave one out")
        return self
