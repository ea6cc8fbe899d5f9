"""A transformer that covers the GPT-2/GPT-3 family and the Llama-3 family, as a decoder or as an encoder.

Shapes: B batch, L length, T new tokens, S length of keys and values (L, or the positions of a cache), D model width,
H query heads, G key-value heads, K head_dim, F mlp width, V vocabulary, E experts.
"""

import dataclasses
import difflib
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxtrain.config.models import TransformerConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import constrain
from jaxtrain.models.from_nnx import from_dict
from jaxtrain.models.initializers import Initializer, normal
from jaxtrain.models.layers import Linear, Norm, dropout, rotary_frequencies, rotate
from jaxtrain.models.model import Decoder, DrawsByRow, Model, Params
from jaxtrain.models.shipped.axes import model_axes
from jaxtrain.models.shipped.moe import MoE, Routing
from jaxtrain.models.shipped.shapes import LinearShape, attention_shapes, mlp_shapes
from jaxtrain.models.stack import make_stack, scan_stack
from jaxtrain.models.stages import from_stages
from jaxtrain.ops.activation import gelu
from jaxtrain.ops.attention.reference import attention, attention_mask
from jaxtrain.ops.attention.table import self_attention
from jaxtrain.ops.embedding import embedding_lookup
from jaxtrain.ops.loss.cross_entropy import DeferredLogits
from jaxtrain.remat.policy import Remat

# The residual stream between blocks; its sequence is also sharded over `tensor` where sequence parallelism is on.
RESIDUAL = ("batch", "residual_sequence", "activation_embed")

# `key` and `value`, in the compute dtype: [B, S, G, K] of one layer, and [num_layers, B, S, G, K] of the model.
Cache = dict[str, jax.Array]

_INPUTS = ("tokens", "positions", "segments")
# Names that other libraries use -> the entry that they mean, where the two are not spelled alike.
_MEANT = {"input_ids": "tokens", "ids": "tokens", "attention_mask": "segments", "padding_mask": "segments"}

_INIT_STDDEV = 0.02  # GPT-2, Radford et al. 2019


def _norm(config: TransformerConfig) -> Norm:
    return Norm(config.embed_dim, kind=config.norm, bias=config.bias, epsilon=config.norm_epsilon)


def _linear(config: TransformerConfig, shape: LinearShape, initializer: Initializer, rngs: nnx.Rngs) -> Linear:
    return Linear(shape.inputs, shape.outputs, bias=config.bias, initializer=initializer, rngs=rngs)


class Attention(nnx.Module):
    """Self-attention with grouped-query heads.

    Args:
        config: sizes and variants.
        rngs: random streams; `params` draws the kernels.
    """

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        shapes = attention_shapes(config)
        init = normal(_INIT_STDDEV)
        # The deeper the model, the smaller the outputs to the residual stream start (GPT-2, section 2.3).
        init_out = normal(_INIT_STDDEV / math.sqrt(2 * config.num_layers))
        self.query = _linear(config, shapes["query"], init, rngs)
        self.key = _linear(config, shapes["key"], init, rngs)
        self.value = _linear(config, shapes["value"], init, rngs)
        self.output = _linear(config, shapes["output"], init_out, rngs)
        self.head_dim = config.head_width
        self.config = config

    def __call__(
        self,
        x_BLD: jax.Array,
        positions_BL: jax.Array,
        segments_BL: jax.Array | None,
        cache: Cache | None,
    ) -> tuple[jax.Array, Cache | None]:
        q_BLHK = self.query(x_BLD)
        k_BSGK, v_BSGK = self.key(x_BLD), self.value(x_BLD)
        if self.config.position == "rotary":
            frequencies = rotary_frequencies(self.head_dim, self.config.rope_theta, self.config.rope_scaling)
            q_BLHK = rotate(q_BLHK, positions_BL, frequencies)
            k_BSGK = rotate(k_BSGK, positions_BL, frequencies)
        q_BLHK = checkpoint_name(constrain(q_BLHK, "batch", "sequence", "activation_heads", None), "query")
        k_BSGK = checkpoint_name(constrain(k_BSGK, "batch", "sequence", "activation_kv_heads", None), "key")
        v_BSGK = checkpoint_name(constrain(v_BSGK, "batch", "sequence", "activation_kv_heads", None), "value")
        window, softcap = self.config.sliding_window, self.config.attention_softcap
        if cache is None:
            y_BLHK = self_attention(
                q_BLHK,
                k_BSGK,
                v_BSGK,
                segments_BL,
                causal=self.config.causal,
                window=window,
                softcap=softcap,
                implementation=self.config.attention,
            )
        else:
            rows = jnp.arange(x_BLD.shape[0])[:, None]
            k_BSGK = cache["key"].at[rows, positions_BL].set(k_BSGK)
            v_BSGK = cache["value"].at[rows, positions_BL].set(v_BSGK)
            cache = {"key": k_BSGK, "value": v_BSGK}
            mask_BLS = attention_mask(positions_BL, jnp.arange(k_BSGK.shape[1])[None], causal=True, window=window)
            y_BLHK = attention(q_BLHK, k_BSGK, v_BSGK, mask_BLS, softcap=softcap)
        y_BLHK = constrain(y_BLHK, "batch", "sequence", "activation_heads", None)
        return checkpoint_name(self.output(y_BLHK), "attention_projection"), cache


class MLP(nnx.Module):
    """GELU (tanh form) or SwiGLU between two linear layers.

    Args:
        config: sizes and variants.
        rngs: random streams; `params` draws the kernels.
    """

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        shapes = mlp_shapes(config)
        init = normal(_INIT_STDDEV)
        init_out = normal(_INIT_STDDEV / math.sqrt(2 * config.num_layers))
        self.up = _linear(config, shapes["up"], init, rngs)
        self.gate = _linear(config, shapes["gate"], init, rngs) if "gate" in shapes else None
        self.down = _linear(config, shapes["down"], init_out, rngs)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        h_BLF = self.up(x_BLD)
        h_BLF = gelu(h_BLF) if self.gate is None else jax.nn.silu(self.gate(x_BLD)) * h_BLF
        h_BLF = checkpoint_name(constrain(h_BLF, "batch", "sequence", "activation_mlp"), "mlp_hidden")
        return checkpoint_name(self.down(h_BLF), "mlp_output")


class Block(nnx.Module):
    """Attention and an MLP (or experts); each takes a norm of the residual stream, and its output is added there.

    Args:
        config: sizes and variants.
        rngs: random streams; `params` draws the kernels.
    """

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.attention_norm = _norm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config, rngs) if config.experts is None else MoE(config, rngs)
        self.dropout = config.dropout

    @staticmethod
    def inner(x_BLD: jax.Array) -> jax.Array:
        """Constrain the input of attention or MLP, where `tensor` shards heads and mlp width, not the sequence."""
        return constrain(x_BLD, "batch", "sequence", "activation_embed")

    def __call__(
        self,
        x_BLD: jax.Array,
        positions_BL: jax.Array,
        segments_BL: jax.Array | None = None,
        key: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Routing | None, Cache | None]:
        keys = (None, None) if key is None else jax.random.split(key)
        with jax.named_scope("attention"):
            y_BLD, cache = self.attention(self.inner(self.attention_norm(x_BLD)), positions_BL, segments_BL, cache)
            x_BLD = constrain(x_BLD + dropout(y_BLD, self.dropout, keys[0]), *RESIDUAL)
        with jax.named_scope("mlp"):
            inner_BLD = self.inner(self.mlp_norm(x_BLD))
            routing: Routing | None = None
            if isinstance(self.mlp, MoE):
                y_BLD, loss_BL, load_E = self.mlp(inner_BLD)
                routing = Routing.of(loss_BL, load_E)
            else:
                y_BLD = self.mlp(inner_BLD)
            x_BLD = constrain(x_BLD + dropout(y_BLD, self.dropout, keys[1]), *RESIDUAL)
        return x_BLD, routing, cache


class Transformer(nnx.Module):
    """Embedding, stacked blocks, norm and output layer.

    Args:
        config: sizes and variants.
        vocab_size: V.
        rngs: random streams; `params` draws the kernels.
    """

    def __init__(self, config: TransformerConfig, vocab_size: int, rngs: nnx.Rngs):
        init = normal(_INIT_STDDEV)
        width = config.embed_dim
        self.embedding = nnx.Param(init(rngs.params(), (vocab_size, width), jnp.float32))
        learned = config.position == "learned"
        positions = (config.max_sequence_length, width)
        self.positions = nnx.Param(init(rngs.params(), positions, jnp.float32)) if learned else None
        self.blocks = make_stack(lambda rngs: Block(config, rngs), config.num_layers, rngs)
        self.output_norm = _norm(config)
        tied = config.tie_embeddings
        self.output = None if tied else nnx.Param(init(rngs.params(), (width, vocab_size), jnp.float32))
        self.config = config

    def embed(self, tokens_BL: jax.Array, positions_BL: jax.Array, key: jax.Array | None) -> jax.Array:
        """Look up the embeddings of tokens, and add those of positions where they are learned.

        Args:
            tokens_BL: token ids, integers.
            positions_BL: positions in the document, integers; a batch of 1 serves all rows.
            key: for dropout; None: no dropout.

        Returns:
            [B, L, D] in the dtype of the table.
        """
        with jax.named_scope("embed"):
            x_BLD = embedding_lookup(self.embedding[...], tokens_BL, rows="vocab")
            if self.positions is not None:
                x_BLD = x_BLD + embedding_lookup(self.positions[...], positions_BL, rows=None)
            x_BLD = dropout(x_BLD, self.config.dropout, key)
            return constrain(x_BLD, *RESIDUAL)

    def head(self, x_BLD: jax.Array) -> DeferredLogits:
        """Apply the final norm; the logits [B, L, V] of the output layer are deferred."""
        with jax.named_scope("output"):
            x_BLD = self.output_norm(x_BLD)
            if self.output is None:
                return DeferredLogits(x_BLD, self.embedding[...], tied=True)
            return DeferredLogits(x_BLD, self.output[...])

    def check_length(self, length: int) -> None:
        """Raise a `ConfigError` where the sequence has more positions than the model has learned."""
        if length > self.config.max_sequence_length and self.positions is not None:
            raise ConfigError(
                f"sequence length {length} exceeds model.max_sequence_length={self.config.max_sequence_length}"
            )

    def decode(self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Apply the model to new tokens, whose keys and values are written to the cache.

        Args:
            tokens_BT: token ids, integers.
            positions_BT: positions at which the tokens are, integers.
            cache: keys and values of earlier positions.

        Returns:
            The logits [B, T, V] of the new tokens, and the cache with their keys and values.
        """

        def call(block: Block, x_BTD: jax.Array, key: None, cache: Cache) -> tuple[jax.Array, Cache | None]:
            x_BTD, _, new_cache = block(x_BTD, positions_BT, cache=cache)
            return x_BTD, new_cache

        x_BTD = self.embed(tokens_BT, positions_BT, None)
        x_BTD, cache = scan_stack(self.blocks, call, x_BTD, path="blocks", remat=Remat(), per_layer=cache)
        return self.head(x_BTD).logits(), cache


def _inputs(inputs: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Split the inputs of a batch into tokens, positions and segments [B, L].

    Positions that the inputs do not give are the indices in the row, [1, L].

    Raises:
        ConfigError: the inputs hold an entry that the model does not read, no tokens, or an entry without integers.
    """
    inputs = inputs if isinstance(inputs, dict) else {"tokens": inputs}
    for name, value in inputs.items():
        if name not in _INPUTS:
            meant = _MEANT.get(name) or difflib.get_close_matches(name, _INPUTS, 1, 0.0)[0]
            advice = "; to leave padding out of the loss, give the batch weights of 0" if "mask" in name else ""
            raise ConfigError(
                f"inputs hold {name!r}, which the transformer does not read; did you mean {meant!r}? It takes "
                f"{', '.join(_INPUTS)}{advice}"
            )
        if value is not None and not jnp.issubdtype(value.dtype, jnp.integer):
            raise ConfigError(
                f"{name} of the transformer are integers, but the inputs hold {value.dtype}; cast to int32"
            )
    if "tokens" not in inputs:
        raise ConfigError(f"inputs of the transformer have no entry 'tokens'; there are {', '.join(inputs) or 'none'}")
    tokens_BL = inputs["tokens"]
    positions_BL = inputs.get("positions", jnp.arange(tokens_BL.shape[1])[None])
    return tokens_BL, positions_BL, inputs.get("segments")


def transformer(config: TransformerConfig, *, vocab_size: int | None = None, remat: Remat | None = None) -> Model:
    """Make the transformer as a `Model`.

    Its inputs are int32 tokens [B, L], or a dict of `tokens`, and optionally `positions` and `segments` [B, L] for
    packed documents. Its outputs are logits [B, L, V] in the compute dtype; with experts they are a dict of `logits`
    and the entries of `Routing.outputs`.

    Args:
        config: sizes and variants.
        vocab_size: V, used where the config does not set `vocab_size`.
        remat: what the backward pass keeps; None: everything.

    Raises:
        ConfigError: neither the config nor the caller gives the size of the vocabulary.
    """
    vocabulary = config.vocab_size or vocab_size
    if vocabulary is None:
        raise ConfigError("model.vocab_size is not set and the data has no vocabulary; set model.vocab_size")

    def make(rngs: nnx.Rngs) -> Transformer:
        return Transformer(config, vocabulary, rngs)

    def embed(module: Transformer, inputs: Any, key: jax.Array | None, train: bool) -> Any:
        tokens_BL, positions_BL, _ = _inputs(inputs)
        module.check_length(tokens_BL.shape[1])
        x_BLD = module.embed(tokens_BL, positions_BL, key if train else None)
        return x_BLD if config.experts is None else {"x": x_BLD, "routing": Routing.none(tokens_BL)}

    def block(block: Block, carry: Any, inputs: Any, key: jax.Array | None, train: bool) -> Any:
        _, positions_BL, segments_BL = _inputs(inputs)
        x_BLD = carry if config.experts is None else carry["x"]
        x_BLD, routing, _ = block(x_BLD, positions_BL, segments_BL, key if train else None)
        return x_BLD if routing is None else {"x": x_BLD, "routing": carry["routing"].plus(routing)}

    def head(module: Transformer, carry: Any, train: bool) -> Any:
        if config.experts is None:
            return module.head(carry)
        return {"logits": module.head(carry["x"]), **carry["routing"].outputs(config.num_layers, train=train)}

    graph, template = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    groups = config.kv_heads
    head_dim = config.head_width

    def init_cache(batch: int, length: int, dtype: DTypeLike) -> Cache:
        shape = (config.num_layers, batch, length, groups, head_dim)
        return {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}

    def decode(params: Params, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        logits, cache = nnx.merge(graph, from_dict(template, params)).decode(tokens_BT, positions_BT, cache)
        return logits.astype(jnp.float32), cache

    name = config.size or "transformer"
    axes = model_axes(config)
    built = from_stages(
        make,
        stack="blocks",
        embed=DrawsByRow(embed),
        block=DrawsByRow(block),
        head=head,
        axes=axes,
        remat=remat,
        name=name,
    )
    # An encoder predicts no next token.
    decoder = Decoder(init_cache, decode, config.max_sequence_length) if config.causal else None
    return dataclasses.replace(
        built,
        decoder=decoder,
        has_experts=config.experts is not None,
        vocab_size=vocabulary,
        num_outputs=vocabulary,
    )
