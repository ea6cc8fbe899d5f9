"""A transformer of equal blocks, as a decoder or as an encoder: embeddings, blocks, output layer.

Shapes: B batch, L length, T new tokens, S length of keys and values (L, or the positions of a cache), D model width,
G key-value heads, K head_dim, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxtrain.config.transformer import TransformerConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import constrain
from jaxtrain.models.from_nnx import from_dict
from jaxtrain.models.initializers import normal
from jaxtrain.models.layers import dropout
from jaxtrain.models.model import Decoder, DrawsByRow, Model, Params
from jaxtrain.models.shipped.axes import model_axes
from jaxtrain.models.shipped.block import INIT_STDDEV, RESIDUAL, Block, Cache, block_norm
from jaxtrain.models.shipped.inputs import TransformerInputs
from jaxtrain.models.shipped.moe import Routing
from jaxtrain.models.shipped.relative import relative_bias, relative_table
from jaxtrain.models.stack import make_stack, scan_stack
from jaxtrain.models.stages import from_stages
from jaxtrain.ops.embedding import embedding_lookup
from jaxtrain.ops.loss.cross_entropy import DeferredLogits
from jaxtrain.remat.policy import Remat


class Transformer(nnx.Module):
    """Embedding, stacked blocks, norm and output layer.

    Args:
        config: sizes and variants.
        vocab_size: V.
        rngs: random streams; `params` draws the kernels.
    """

    def __init__(self, config: TransformerConfig, vocab_size: int, rngs: nnx.Rngs):
        init = normal(INIT_STDDEV)
        width = config.embed_dim
        self.embedding = nnx.Param(init(rngs.params(), (vocab_size, width), jnp.float32))
        learned = config.position == "learned"
        positions, types = config.max_sequence_length + config.position_offset, config.token_types
        self.positions = nnx.Param(init(rngs.params(), (positions, width), jnp.float32)) if learned else None
        self.token_types = nnx.Param(init(rngs.params(), (types, width), jnp.float32)) if types else None
        self.relative_positions = relative_table(config, rngs)
        self.embedding_norm = block_norm(config) if config.embedding_norm else None
        self.blocks = make_stack(lambda rngs: Block(config, rngs), config.num_layers, rngs)
        # After the last block of this form the residual stream is normalized already.
        self.output_norm = None if config.block == "post" else block_norm(config)
        tied = config.tie_embeddings
        self.output = None if tied else nnx.Param(init(rngs.params(), (width, vocab_size), jnp.float32))
        self.config = config

    def embed(self, inputs: TransformerInputs, key: jax.Array | None) -> jax.Array:
        """Look up the embeddings of tokens, and add those of positions and token types where there are any.

        Args:
            inputs: tokens [B, L] with what belongs to them.
            key: for dropout; None: no dropout.

        Returns:
            [B, L, D] in the dtype of the table.
        """
        config = self.config
        with jax.named_scope("embed"):
            x_BLD = embedding_lookup(self.embedding[...], inputs.tokens_BL, rows="vocab")
            if config.embedding_scale is not None:
                x_BLD = x_BLD * jnp.asarray(config.embedding_scale, x_BLD.dtype)
            if self.positions is not None:
                positions_BL = inputs.positions_BL + config.position_offset
                x_BLD = x_BLD + embedding_lookup(self.positions[...], positions_BL, rows=None)
            if self.token_types is not None:
                types_BL = inputs.token_types_BL
                types_BL = jnp.zeros_like(inputs.tokens_BL) if types_BL is None else types_BL
                x_BLD = x_BLD + embedding_lookup(self.token_types[...], types_BL, rows=None)
            if self.embedding_norm is not None:
                x_BLD = self.embedding_norm(x_BLD)
            x_BLD = dropout(x_BLD, config.dropout, key)
            return constrain(x_BLD, *RESIDUAL)

    def head(self, x_BLD: jax.Array) -> DeferredLogits:
        """Apply the final norm; the logits [B, L, V] of the output layer are deferred."""
        with jax.named_scope("output"):
            x_BLD = x_BLD if self.output_norm is None else self.output_norm(x_BLD)
            if self.config.logits_scale is not None:
                x_BLD = x_BLD * jnp.asarray(self.config.logits_scale, x_BLD.dtype)
            softcap = self.config.logits_softcap
            if self.output is None:
                return DeferredLogits(x_BLD, self.embedding[...], tied=True, softcap=softcap)
            return DeferredLogits(x_BLD, self.output[...], softcap=softcap)

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

        locals_N = _local_layers(self.config)
        bias_HW = relative_bias(self.relative_positions, self.config, self.config.relative_max_distance)

        def call(block: Block, x_BTD: jax.Array, key: None, layer: Any) -> tuple[jax.Array, Cache | None]:
            cache, local = layer
            x_BTD, _, new_cache = block(x_BTD, positions_BT, cache=cache, local=local, bias_HW=bias_HW)
            return x_BTD, new_cache

        x_BTD = self.embed(TransformerInputs(tokens_BT, positions_BT), None)
        per_layer = (cache, locals_N)
        x_BTD, cache = scan_stack(self.blocks, call, x_BTD, path="blocks", remat=Remat(), per_layer=per_layer)
        return self.head(x_BTD).logits(), cache


def _local_layers(config: TransformerConfig) -> np.ndarray | None:
    """Which layers are local ones, bool [num_layers]; None where the model has none."""
    if config.local_layers is None:
        return None
    return np.array([window is not None for window in config.windows])


def transformer(config: TransformerConfig, *, vocab_size: int | None = None, remat: Remat | None = None) -> Model:
    """Make the transformer as a `Model`.

    Its inputs are int32 tokens [B, L], or a dict of `tokens`, and optionally `positions`, `segments` (packed documents
    or padding) and `token_types` [B, L]. Its outputs are logits [B, L, V] in the compute dtype; with experts they are a
    dict of `logits` and the entries of `Routing.outputs`.

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
        read = TransformerInputs.of(inputs, config)
        module.check_length(read.tokens_BL.shape[1])
        carry = {"x": module.embed(read, key if train else None)}
        if config.experts is not None:
            carry["routing"] = Routing.none(read.tokens_BL)
        bias_HW = relative_bias(module.relative_positions, config, read.tokens_BL.shape[1] - 1)
        if bias_HW is not None:  # every stage of a pipeline needs it, and only the first has the table
            carry["bias"] = bias_HW
        return carry if len(carry) > 1 else carry["x"]

    def block(
        block: Block, carry: Any, inputs: Any, key: jax.Array | None, train: bool, local: jax.Array | None = None
    ) -> Any:
        read = TransformerInputs.of(inputs, config)
        key = key if train else None
        carried = carry if isinstance(carry, dict) else {"x": carry}
        x_BLD, routing, _ = block(
            carried["x"], read.positions_BL, read.segments_BL, key, local=local, bias_HW=carried.get("bias")
        )
        after = {**carried, "x": x_BLD}
        if routing is not None:
            after["routing"] = carried["routing"].plus(routing)
        return after if isinstance(carry, dict) else x_BLD

    def head(module: Transformer, carry: Any, train: bool) -> Any:
        if config.experts is None:
            return module.head(carry["x"] if isinstance(carry, dict) else carry)
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
        per_layer=_local_layers(config),
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
