"""Settings of the shipped models, whose published families are rows of values (`size`, `from`). No jax here."""

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, create_model, field_validator, model_validator

from jaxtrain.config.base import Call, Count, Flags, Fraction, Group, NonNegative, Positive, PositiveInt, Ratio, kind_or
from jaxtrain.config.errors import AlsoCalled
from jaxtrain.config.rope import AnyRope, AttentionTemperature, Factors, LatentConfig, LocalLayers, StateSpaceConfig
from jaxtrain.errors import ConfigError
from jaxtrain.families.table import sizes_of
from jaxtrain.formats.rows import has_bias, norm_has_bias

# Key of a model group -> value.
Size = dict[str, object]

GATED = ("swiglu", "geglu", "geglu_exact", "clamped_swiglu")
"""Activations that multiply the activated gate with a second linear layer."""
EmbedDim = Annotated[PositiveInt, AlsoCalled("hidden_size", "d_model")]
NumHeads = Annotated[PositiveInt, AlsoCalled("heads")]
Attention = Literal["auto", "cudnn", "splash", "blockwise", "reference"]
Activation = Literal["gelu", "gelu_exact", "quick_gelu", "relu", "swiglu", "geglu", "geglu_exact", "clamped_swiglu"]

TRANSFORMER_SIZES: dict[str, Size] = dict(sizes_of("transformer"))
VIT_SIZES: dict[str, Size] = dict(sizes_of("vit"))
RESNET_SIZES: dict[str, Size] = dict(sizes_of("resnet"))
ENCODER_DECODER_SIZES: dict[str, Size] = dict(sizes_of("encoder_decoder"))
CLIP_SIZES: dict[str, Size] = dict(sizes_of("clip"))
ALL_SIZES: dict[str, Size] = {**TRANSFORMER_SIZES, **VIT_SIZES, **RESNET_SIZES, **CLIP_SIZES}

if TYPE_CHECKING:

    class _From(Group):
        """The key `from`."""

else:
    _DOC = "Published folder, .gguf file or hub id: sets keys that are not set, and initial weights; null: none."
    # `from` is a word of the language, so that a class body cannot hold it.
    _From = create_model("_From", __base__=Group, **{"from": (str | None, Field(default=None, description=_DOC))})


class Published(_From):
    """Groups of models that are published."""

    sizes: ClassVar[Mapping[str, Size]] = {}

    size: str | None = None
    """Published size that sets the keys that are not set here (gpt2, llama3.1_8b, t5_small, ...)."""

    @model_validator(mode="before")
    @classmethod
    def _from_size(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        size: dict[str, Any] = {**cls.sizes.get(str(values.get("size")), {})}
        for key in size.keys() & values.keys():
            # Whoever names a kind describes the whole of a group.
            if isinstance(size[key], dict) and isinstance(values[key], dict) and "kind" not in values[key]:
                values = values | {key: size[key] | values[key]}
        return size | values

    @field_validator("size")
    @classmethod
    def _is_known(cls, size: str | None) -> str | None:
        if size is not None and size not in cls.sizes:
            near = difflib.get_close_matches(size, cls.sizes, 3, 0.0)
            raise ValueError(f"no published size {size!r}; the nearest are {', '.join(near)}")
        return size


def published_from(model: Group) -> str | None:
    """Returns the published model that a model group starts from, or None."""
    return getattr(model, "from", None)


class HeadConfig(Group):
    """The output of a transformer: logits over tokens or labels, numbers, or an embedding."""

    kind: Literal["language_model", "masked_language_model", "sequence", "token", "regression", "embedding"] = (
        "language_model"
    )
    """Logits over the vocabulary, or over labels per text (sequence) or per token; numbers or an embedding per text."""
    num_labels: PositiveInt | None = None
    """Number of labels, or of outputs of a regression; null: as in the data."""
    pooling: Literal["first", "last", "mean"] = "first"
    """How tokens become one vector per text: the first one, the last one or the mean, padding left out."""
    hidden: Literal["none", "tanh", "relu", "gelu", "gelu_exact"] | None = None
    """Activation of a hidden layer before the output; null: no layer (masked_language_model: gelu_exact and a norm)."""
    dropout: Fraction = 0.0
    """Dropout rate of the output layer's inputs."""
    hidden_norm: bool = False
    """Normalize the output of the hidden layer, as a masked_language_model always does (ModernBERT)."""
    bias: bool | Literal["output"] = True
    """Add biases to the layers and norms of the head; or to its last layer alone (output: ModernBERT)."""
    normalize: bool = False
    """Divide an embedding by its Euclidean norm."""

    @property
    def has_labels(self) -> bool:
        """Whether the outputs are labels or numbers, as many as the config or the data says."""
        return self.kind in ("sequence", "token", "regression")

    @property
    def is_pooled(self) -> bool:
        """Whether there is one output per text."""
        return self.kind in ("sequence", "regression", "embedding")

    @model_validator(mode="after")
    def _norm_has_its_layer(self) -> Self:
        if self.hidden_norm and self.hidden is None:
            raise ValueError("head.hidden_norm is of the layer that head.hidden adds; set head.hidden, as gelu_exact")
        return self

    @model_validator(mode="before")
    @classmethod
    def _one_way_to_say_it(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("kind") == "masked_language_model":
            return values if values.get("hidden") else values | {"hidden": "gelu_exact"}
        return values | {"hidden": None} if values.get("hidden") == "none" else values


class ExpertsConfig(Group):
    """A mixture of experts in place of each block's MLP; every expert is an MLP of width mlp_dim."""

    num_experts: PositiveInt = 8
    """Number of experts in each block."""
    experts_per_token: PositiveInt = 2
    """Number of experts that the router chooses for each token."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What the router makes of its logits: a probability among all experts, or each one's sigmoid (DeepSeek V3)."""
    score_bias: bool = False
    """Add a bias per expert to the scores by which experts are chosen (DeepSeek V3)."""
    score_bias_step: NonNegative = 0.001
    """How far an update moves that bias down for an expert with more tokens than the mean, else up; 0: it stays."""
    normalize_weights: bool | None = None
    """Let the weights of a token's experts sum to 1; null: with several experts per token."""
    weights_scale: Positive = 1.0
    """Factor of the weights of the experts."""
    weigh_inputs: bool = False
    """Multiply the input of a token's expert by its weight, in place of the output (Llama 4)."""
    groups: PositiveInt = 1
    """Equal groups of experts; a token takes experts of the groups whose two best scores are largest."""
    groups_per_token: PositiveInt = 1
    """Number of groups that a token takes experts of."""
    shared_dim: PositiveInt | None = None
    """Width of an MLP that every token passes beside its experts; null: none."""
    dense_layers: Count = 0
    """Number of blocks with one MLP for all tokens, before the num_layers blocks with experts (DeepSeek)."""
    dense_dim: PositiveInt | None = None
    """Hidden width of the MLP of these blocks; null: 4 x embed_dim."""
    load_balance_weight: NonNegative = 0.01
    """Weight of the loss that makes the experts process equal numbers of tokens."""
    router_z_weight: NonNegative = 0.001
    """Weight of the loss that keeps the router's logits small."""

    @property
    def normalizes(self) -> bool:
        """Whether the weights of a token's experts sum to 1, before their factor."""
        return self.experts_per_token > 1 if self.normalize_weights is None else self.normalize_weights

    @property
    def groups_fit(self) -> bool:
        """Whether the groups are equal, and hold two experts each and those of a token."""
        size, rest = divmod(self.num_experts, self.groups)
        fits = rest == 0 and size > 1 and self.groups_per_token * size >= self.experts_per_token
        return self.groups == 1 or (fits and self.groups_per_token <= self.groups)


class _Blocks(Published):
    """The settings that a transformer and an encoder-decoder share."""

    num_layers: PositiveInt = 6
    """Number of identical blocks, whose parameters are stacked; of the encoder, if there is one."""
    embed_dim: EmbedDim = 384
    """Width of the residual stream."""
    num_heads: NumHeads = 6
    """Number of query heads."""
    num_kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped-query attention); null: as many as query heads."""
    head_dim: PositiveInt | None = None
    """Width of a head; null: embed_dim / num_heads."""
    mlp_dim: PositiveInt | None = None
    """Hidden width of the MLP, or of each expert; null: 4 x embed_dim."""
    vocab_size: PositiveInt | None = None
    """Number of token ids in the embedding; null: the vocabulary of the data."""
    relative_buckets: Annotated[int, Field(ge=4, le=2**16)] = 32
    """Relative positions: number of distance buckets, each with a learned bias per head."""
    relative_max_distance: PositiveInt = 128
    """Relative positions: distance beyond which all keys share a bucket."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """Normalization in the blocks and before the output layer."""
    attention_scale: Positive | None = None
    """Factor of the attention scores (T5: 1); null: 1 / sqrt(head_dim)."""
    tie_embeddings: bool = False
    """Use the embedding as the output layer."""
    logits_scale: Positive | None = None
    """Factor of the logits (T5 with tied embeddings: 1 / sqrt(embed_dim)); null: 1."""
    dropout: Fraction = 0.0
    """Dropout rate of the embeddings and of the outputs of attention and MLP."""
    attention: Attention = "auto"
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

    @model_validator(mode="after")
    def _heads(self) -> Self:
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim {self.embed_dim} is not a multiple of num_heads {self.num_heads}; set head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        return self


class TransformerConfig(_Blocks):
    """A transformer, as a decoder or as an encoder: the families of GPT, Llama, Qwen, Gemma, Phi, NeoX and BERT."""

    sizes = TRANSFORMER_SIZES

    kind: Literal["transformer"] = "transformer"
    experts: ExpertsConfig | None = None
    """Mixture of experts in place of the MLP; null: one MLP for all tokens."""
    max_sequence_length: PositiveInt = 256
    """Longest sequence that the model accepts, in tokens; also the number of learned positions."""
    position: Literal["learned", "rotary", "relative", "none"] = "rotary"
    """Positions: learned embeddings, rotation of queries and keys, biases by distance (T5), or none."""
    position_offset: Count = 0
    """Number of learned positions before the first one that is used (RoBERTa: 2)."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: Annotated[AnyRope | None, kind_or("llama3")] = None
    """Scaling of rotary frequencies for long contexts; null: no scaling."""
    rotary_fraction: Ratio = 1.0
    """Fraction of a head's dimensions, from the first on, that are rotated (GPT-NeoX: 0.25)."""
    rope_layers: Flags | None = None
    """Layers with rotary positions (1) and without positions (0), as a repeated pattern (SmolLM3); null: all 1."""
    rotary_interleaved: bool = False
    """Rotate neighbouring dims as pairs (GPT-J, Cohere), instead of first half with second half."""
    block: Literal["pre", "post", "output", "sandwich", "parallel", "parallel_one_norm"] = "pre"
    """Norm of inputs (pre), sums (post), outputs, or inputs and outputs (sandwich); parallel: attention beside MLP."""
    residual_scale: Positive | None = None
    """Factor of the outputs of attention and MLP on the residual stream (Granite); null: 1."""
    norm_epsilon: Ratio = 1e-5
    """Added to the variance in each normalization."""
    norm_offset: bool = False
    """Store each norm's scale minus 1 (Gemma)."""
    norm_bias: bool | None = None
    """Add biases to LayerNorm (StableLM: true, with bias: false); null: if bias is true."""
    qk_norm: bool | Literal["per_head", "whole", "rotated"] = False
    """Normalize queries and keys: a head, with scales per_head, all heads (whole), rotated ones unscaled (Llama 4)."""
    attention_softcap: Positive | None = None
    """Soft cap c of the attention scores s, computed as c tanh(s / c) (Gemma 2); null: no cap."""
    attention_temperature: AttentionTemperature | None = None
    """Growth of queries with their position in layers without rotary positions (Llama 4); null: none."""
    attention_sinks: bool = False
    """Attention sinks: add a learned score per head to the softmax, whose value is 0 (gpt-oss)."""
    activation: Activation = "swiglu"
    """Nonlinearity of the MLP (gelu and geglu in the tanh form of GPT-2, those in _exact by the error function)."""
    embedding_scale: Positive | None = None
    """Factor of the token embeddings (Gemma: sqrt(embed_dim)); null: 1."""
    embedding_width: PositiveInt | None = None
    """Width of the embeddings, which a linear layer maps to embed_dim (ELECTRA small: 128); null: embed_dim."""
    embedding_norm: bool | Literal["first_layer"] = False
    """Normalize the sum of the embeddings (BERT); first_layer: by the norm of its attention's input (ModernBERT)."""
    token_types: Count = 0
    """Number of learned embeddings of token types (BERT: 2, the two texts of a pair); 0: none."""
    logits_softcap: Positive | None = None
    """Soft cap c of the logits z, computed as c tanh(z / c) (Gemma 2); null: no cap."""
    head: HeadConfig | None = None
    """Output of the model: labels, numbers or an embedding of a text, or masked tokens; null: the next token."""
    bias: bool | Literal["qkv", "attention", "mlp"] = False
    """Add biases to linear layers and LayerNorm; or only to queries, keys and values (qkv), attention or MLP."""
    output_bias: bool = False
    """Add a bias to the output layer (Phi-2, GPT-J)."""
    causal: bool = True
    """Each position attends to itself and earlier ones; false: to all (an encoder)."""
    sliding_window: PositiveInt | None = None
    """Attend to this many positions, up to the own one, and as many ahead if not causal; null: to all."""
    local_layers: LocalLayers | None = None
    """Layers with sliding-window attention between layers with full attention; null: all layers are alike."""
    latent: LatentConfig | None = None
    """Multi-head latent attention, whose head_dim is nope_dim + rope_dim (DeepSeek V2); null: attention."""
    state_space: StateSpaceConfig | None = None
    """A state space in the place of attention and MLP (Mamba 2); null: attention and an MLP."""

    @property
    def head_width(self) -> int:
        """Width of a head's queries and keys."""
        return super().head_width if self.latent is None else self.latent.nope_dim + self.latent.rope_dim

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP or of each expert; 0 in a block without one."""
        return super().mlp_width if self.state_space is None else 0

    @property
    def head_kind(self) -> str:
        """Kind of the head, with the default of `head` filled in."""
        return "language_model" if self.head is None else self.head.kind

    @property
    def has_output_layer(self) -> bool:
        """Whether the model has logits of the vocabulary, by its embedding or by an output layer of its own."""
        return self.head_kind in ("language_model", "masked_language_model")

    @property
    def table_width(self) -> int:
        """Width of the embeddings, with the default of `embedding_width` filled in."""
        return self.embedding_width or self.embed_dim

    @property
    def output_width(self) -> int:
        """Width of what the output layer takes: of the embeddings, where a head for masked tokens leads back to it."""
        return self.table_width if self.head_kind == "masked_language_model" else self.embed_dim

    @property
    def shared(self) -> "TransformerConfig | None":
        """The blocks whose MLP is the one that every token passes beside its experts, where there is one."""
        if self.experts is None or self.experts.shared_dim is None:
            return None
        return self.model_copy(update=dict(experts=None, mlp_dim=self.experts.shared_dim))

    @property
    def leading(self) -> "TransformerConfig | None":
        """The blocks before those with experts, where there are any."""
        if self.experts is None or not self.experts.dense_layers:
            return None
        experts = self.experts
        return self.model_copy(update=dict(experts=None, mlp_dim=experts.dense_dim, num_layers=experts.dense_layers))

    @property
    def depth(self) -> int:
        """Blocks of the model, those before the blocks with experts too."""
        return self.num_layers + (0 if self.leading is None else self.leading.num_layers)

    def has_bias(self, part: str) -> bool:
        """Whether a linear layer of a block (query, key, value, output, up, gate, down) has a bias."""
        return has_bias(self.bias, part)

    @property
    def norms_have_biases(self) -> bool:
        """Whether the norms of the residual stream have biases."""
        return norm_has_bias(self.norm, self.bias, self.norm_bias)

    @property
    def rotary_dims(self) -> int:
        """Dims of a head that are rotated."""
        return int(self.head_width * self.rotary_fraction) if self.latent is None else self.latent.rope_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer's attention, with the pattern of `local_layers` repeated; None: it sees all."""
        if self.local_layers is None:
            return (self.sliding_window,) * self.num_layers
        pattern, window = self.local_layers.pattern, self.local_layers.window
        return tuple(window if pattern[i % len(pattern)] else None for i in range(self.num_layers))

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        pairs = self.position != "rotary" or (self.rotary_dims > 0 and self.rotary_dims % 2 == 0)
        head, moe = self.head, self.experts is not None
        too_many = self.experts is not None and self.experts.experts_per_token > self.experts.num_experts
        weighs_many = self.experts is not None and self.experts.weigh_inputs and self.experts.experts_per_token > 1
        rotary = self.position == "rotary"
        patterned = self.local_layers is not None or self.rope_layers is not None
        patterned |= self.embedding_norm == "first_layer"
        sees_one = head is not None and head.is_pooled and head.pooling == "first" and self.causal
        refused = {
            f"rotary positions rotate pairs of dims, not {self.rotary_dims}; set an even head_dim": not pairs,
            "experts.experts_per_token is more than experts.num_experts; lower it": too_many,
            "experts.weigh_inputs is of one expert per token; set experts.experts_per_token: 1": weighs_many,
            "attention_temperature is of layers without rotary positions; set rope_layers": rotary
            and self.attention_temperature is not None
            and all(self.rope_layers or (1,)),
            "qk_norm=rotated is of rotary positions; set position: rotary": self.qk_norm == "rotated" and not rotary,
            "experts.groups are not equal groups of two experts and more, of which groups_per_token hold those of a "
            "token": self.experts is not None and not self.experts.groups_fit,
            "experts have activation gelu, swiglu or clamped_swiglu": moe
            and self.activation not in ("gelu", "swiglu", "clamped_swiglu"),
            "experts add losses per token, which this head does not support; set head: null": moe
            and not self.has_output_layer,
            "output_bias is of an output layer, and this head has a bias of its own, head.bias; leave it out": (
                self.output_bias and self.head_kind == "masked_language_model"
            ),
            "head.pooling=first with causal: true sees only one token; set head.pooling: last (or mean)": sees_one,
            "experts.dense_layers go with neither local_layers, rope_layers nor embedding_norm: first_layer": patterned
            and self.leading is not None,
            "latent attention has head_dim = nope_dim + rope_dim of at least value_dim, as many heads of keys as of "
            "queries, and no qk_norm, biases or rotary_fraction": self.latent is not None
            and not self._latent_fits(self.latent),
            "sliding_window applies to all layers, local_layers to some; leave one out": self.local_layers is not None
            and self.sliding_window is not None,
            "embedding_norm=first_layer is a norm of the inputs of attention alone; set block: pre": (
                self.embedding_norm == "first_layer" and self.block != "pre"
            ),
            "embeddings of embedding_width are no output layer of width embed_dim; set tie_embeddings: false": (
                self.tie_embeddings and self.has_output_layer and self.table_width != self.output_width
            ),
        }
        for reason, is_so in refused.items():
            if is_so:
                raise ValueError(reason)
        if self.state_space is not None:
            self.state_space.check(self, self.num_heads)
        return self

    def _latent_fits(self, latent: LatentConfig) -> bool:
        same_heads = self.kv_heads == self.num_heads and self.head_dim in (None, self.head_width)
        plain = not self.qk_norm and self.bias in (False, "mlp") and self.rotary_fraction == 1
        return same_heads and plain and latent.value_dim <= self.head_width


class EncoderDecoderConfig(_Blocks):
    """An encoder that reads a text, and a decoder that generates another: the families of T5 and Flan-T5."""

    sizes = ENCODER_DECODER_SIZES

    kind: Literal["encoder_decoder"] = "encoder_decoder"
    num_decoder_layers: PositiveInt | None = None
    """Number of identical blocks of the decoder; null: as many as the encoder has."""
    max_sequence_length: PositiveInt = 512
    """Longest input, and longest output, that the model accepts, in tokens."""
    position: Literal["relative", "rotary", "none"] = "relative"
    """Positions: biases by distance (T5), rotation of queries and keys, or none."""
    norm_epsilon: Ratio = 1e-6
    """Added to the variance in each normalization."""
    activation: Activation = "geglu"
    """Nonlinearity of the MLP (gelu and geglu in the tanh form of GPT-2, those in _exact by the error function)."""
    bias: bool = False
    """Add biases to linear layers and LayerNorm."""
    start_token: Count = 0
    """Token that the decoder starts from (T5: 0, its padding); the same as decoder_start of the data."""

    @property
    def decoder_layers(self) -> int:
        """Blocks of the decoder, with the default of `num_decoder_layers` filled in."""
        return self.num_decoder_layers or self.num_layers

    @property
    def encoder_stack(self) -> TransformerConfig:
        """The blocks of the encoder, as those of a transformer."""
        return self._stack(self.num_layers, causal=False)

    @property
    def decoder_stack(self) -> TransformerConfig:
        """The blocks of the decoder, as those of a transformer; each has cross-attention besides."""
        return self._stack(self.decoder_layers, causal=True)

    def _stack(self, num_layers: int, *, causal: bool) -> TransformerConfig:
        own = {"kind", "from", "size", "num_layers", "tie_embeddings", "logits_scale"}
        shared = (TransformerConfig.model_fields.keys() & type(self).model_fields.keys()) - own
        values = {name: getattr(self, name) for name in shared}
        return TransformerConfig(num_layers=num_layers, causal=causal, **values)


class ViTConfig(Published):
    """A vision transformer, which classifies images (Dosovitskiy et al. 2020)."""

    sizes = VIT_SIZES

    kind: Literal["vit"] = "vit"
    num_layers: PositiveInt = 12
    """Number of identical blocks, whose parameters are stacked."""
    embed_dim: EmbedDim = 192
    """Width of the residual stream."""
    num_heads: NumHeads = 3
    """Number of attention heads."""
    mlp_dim: PositiveInt | None = None
    """Hidden width of the MLP; null: 4 x embed_dim."""
    patch_size: PositiveInt = 16
    """Height and width of a patch, in pixels."""
    image_size: PositiveInt | None = None
    """Height and width of an image, in pixels; null: that of the data."""
    channels: PositiveInt | None = None
    """Channels of an image; null: those of the data."""
    num_classes: PositiveInt | None = None
    """Number of outputs; null: the classes of the data."""
    pooling: Literal["first", "mean"] = "first"
    """How patches become one vector per image: a class token before the patches (first), or their mean."""
    activation: Literal["gelu", "gelu_exact", "quick_gelu"] = "gelu_exact"
    """Nonlinearity of the MLP (gelu in the tanh form, gelu_exact by the error function, quick_gelu of CLIP)."""
    embedding_norm: bool = False
    """Normalize the sum of the embeddings (CLIP)."""
    outer_bias: bool = True
    """Add biases to the layers of patches and classes (CLIP: false)."""
    norm_epsilon: Ratio = 1e-6
    """Added to the variance in each LayerNorm."""
    dropout: Fraction = 0.0
    """Dropout rate of the embeddings and of the outputs of attention and MLP."""
    attention: Attention = "auto"
    """Implementation of attention; auto: the first of the platform's table that takes the case (docs/attention.md)."""

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP, with the default of `mlp_dim` filled in."""
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def head(self) -> HeadConfig:
        """The head that classifies; the mean counts every patch."""
        return HeadConfig(kind="sequence", pooling=self.pooling, bias=self.outer_bias)

    def num_tokens(self, image_size: int) -> int:
        """Length of the sequence that the blocks see: the patches, and the class token where there is one."""
        return (image_size // self.patch_size) ** 2 + (self.pooling == "first")

    def blocks(self, image_size: int) -> TransformerConfig:
        """The transformer whose blocks these are, for images of this height and width; its vocabulary means nothing."""
        same = ("num_layers", "embed_dim", "num_heads", "norm_epsilon", "activation", "dropout", "attention")
        same += ("embedding_norm",)
        fixed = dict(vocab_size=1, position="learned", norm="layernorm", bias=True, causal=False)
        values = {name: getattr(self, name) for name in same} | fixed | dict(head=self.head)
        return TransformerConfig(**values, mlp_dim=self.mlp_width, max_sequence_length=self.num_tokens(image_size))

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim {self.embed_dim} is not a multiple of num_heads {self.num_heads}; change one")
        return self


def image_sizes(config: ViTConfig, input_shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns height and width (which are equal) and channels of the images that a vision transformer gets.

    Raises:
        ConfigError: the rows, of this shape, are no square images, or not of the size that the config wants.
    """
    wanted = (config.image_size, config.image_size, config.channels)
    square = len(input_shape) == 3 and input_shape[0] == input_shape[1] and input_shape[0] % config.patch_size == 0
    if not square or any(want not in (None, found) for want, found in zip(wanted, input_shape, strict=True)):
        raise ConfigError(
            f"model.kind=vit needs square images that divide into patches of model.patch_size={config.patch_size}, and "
            f"that match model.image_size and model.channels if set, not rows of shape {list(input_shape)}"
        )
    return input_shape[0], input_shape[2]


class _Tower(Group):
    """The settings that both encoders of CLIP have."""

    num_layers: PositiveInt = 12
    """Number of equal blocks, whose parameters are stacked."""
    embed_dim: EmbedDim = 512
    """Width of the residual stream."""
    num_heads: NumHeads = 8
    """Number of attention heads."""
    mlp_dim: PositiveInt | None = None
    """Hidden width of the MLP; null: 4 x embed_dim."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim {self.embed_dim} is not a multiple of num_heads {self.num_heads}; change one")
        return self


class TextTower(_Tower):
    """The text encoder of CLIP: a causal transformer, of which the token at the end stands for the text."""

    vocab_size: PositiveInt = 49408
    """Number of token ids in the embedding."""
    max_sequence_length: PositiveInt = 77
    """Longest text that the model accepts, in tokens; also the number of its learned positions."""


class ImageTower(_Tower):
    """The image encoder of CLIP: a vision transformer, of which the class token stands for the image."""

    embed_dim: EmbedDim = 768
    """Width of the residual stream."""
    num_heads: NumHeads = 12
    """Number of attention heads."""
    patch_size: PositiveInt = 32
    """Height and width of a patch, in pixels."""
    image_size: PositiveInt = 224
    """Height and width of an image, in pixels."""
    channels: PositiveInt = 3
    """Channels of an image."""

    @model_validator(mode="after")
    def _whole_patches(self) -> Self:
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")
        return self


class CLIPConfig(Published):
    """An encoder of images and one of texts, whose embeddings are compared (CLIP, Radford et al. 2021)."""

    sizes = CLIP_SIZES

    kind: Literal["clip"] = "clip"
    text: TextTower = TextTower()
    """The encoder of texts."""
    image: ImageTower = ImageTower()
    """The encoder of images."""
    projection_dim: PositiveInt = 512
    """Width of the embeddings that are compared."""
    activation: Literal["quick_gelu", "gelu", "gelu_exact"] = "quick_gelu"
    """Nonlinearity of the MLPs (quick_gelu: x sigmoid(1.702 x); gelu in the tanh form, gelu_exact exactly)."""
    norm_epsilon: Ratio = 1e-5
    """Added to the variance in each LayerNorm."""
    end_token: Count | None = None
    """Token whose first place gives the embedding of a text; null: the first place of its largest id."""
    attention: Attention = "auto"
    """Implementation of attention; auto: the first of the platform's table that takes the case (docs/attention.md)."""

    @property
    def text_tower(self) -> TransformerConfig:
        """The text encoder as a transformer, whose labels are the embedding."""
        head = HeadConfig(kind="sequence", num_labels=self.projection_dim, pooling="last", bias=False)
        fixed = dict(position="learned", norm="layernorm", bias=True, head=head)
        return TransformerConfig(**self.text.model_dump(), **self._both, **fixed)

    @property
    def image_tower(self) -> ViTConfig:
        """The image encoder as a vision transformer, whose classes are the embedding."""
        fixed = dict(embedding_norm=True, outer_bias=False, num_classes=self.projection_dim)
        return ViTConfig(**self.image.model_dump(), **self._both, **fixed)

    @property
    def _both(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("activation", "norm_epsilon", "attention")}


class ResNetConfig(Published):
    """A residual convolutional network for images (He et al. 2015)."""

    sizes = RESNET_SIZES

    kind: Literal["resnet"] = "resnet"
    stage_blocks: Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1)] = (2, 2, 2, 2)
    """Residual blocks per stage; each stage after the first halves the image and doubles the width."""
    bottleneck: bool = False
    """Use blocks of three convolutions whose output is four times as wide."""
    width: PositiveInt = 64
    """Channels of the first stage."""
    stem: Literal["imagenet", "small"] = "imagenet"
    """imagenet: 7x7 convolution of stride 2 and max-pool; small: 3x3 of stride 1, for images under about 64 pixels."""
    num_classes: PositiveInt | None = None
    """Number of outputs; null: the classes of the data."""


class OutputScale(Group):
    """The units of a model's outputs: output = mean + deviation x output of the last layer."""

    mean: Annotated[tuple[Annotated[float, Field(ge=-1e30, le=1e30)], ...], Field(strict=False, min_length=1)]
    """Mean of each output, or one for all."""
    deviation: Factors
    """Standard deviation of each output, or one for all."""


class MLPConfig(Group):
    """A multilayer perceptron over flattened inputs."""

    kind: Literal["mlp"] = "mlp"
    hidden_dims: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = (256, 256)
    """Widths of the hidden layers."""
    activation: Literal["relu", "gelu"] = "relu"
    """Nonlinearity after each hidden layer."""
    num_outputs: PositiveInt | None = None
    """Number of outputs; null: the classes or target columns of the data."""
    dropout: Fraction = 0.0
    """Dropout rate after each hidden layer."""
    output_scale: OutputScale | None = None
    """Units of the outputs; null: those of the targets, if task=regression and data.standardize is on."""


class CalledModel(Call):
    """A model of your own: a function that returns a jaxtrain.Model."""

    kind: Literal["called"] = "called"


ModelConfig = Annotated[
    TransformerConfig | EncoderDecoderConfig | ViTConfig | CLIPConfig | ResNetConfig | MLPConfig | CalledModel,
    Field(discriminator="kind"),
    kind_or("transformer"),
]
