"""An encoder that reads a text and a decoder that writes another one, both of the transformer's blocks, as in T5.

Shapes: B batch, S length of the input, T of the output (or new tokens), C positions of a cache, D model width, G
key-value heads, K head_dim, H query heads, V vocabulary, W distances of keys and queries.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config.model import EncoderDecoderConfig, TransformerConfig
from jaxtrain.config.schema import Remat
from jaxtrain.layout.sharding import constrain
from jaxtrain.models.from_nnx import from_dict, from_nnx, make_stack, scan_stack
from jaxtrain.models.initializers import INIT_STDDEV, normal
from jaxtrain.models.layers import dropout, scaled
from jaxtrain.models.model import Decoder, DefersLogits, DrawsByRow, Model, Params
from jaxtrain.models.shipped.block import (
    RESIDUAL,
    Attention,
    Block,
    Cache,
    Context,
    LayerCache,
    Stddevs,
    block_norm,
    fan_in_stddevs,
    init_cache,
    relative_bias,
    relative_table,
    small_stddevs,
)
from jaxtrain.models.shipped.shapes import model_tensors, size_of
from jaxtrain.models.shipped.transformer import check_entries
from jaxtrain.ops.attention.reference import attention
from jaxtrain.ops.embedding import embedding_lookup
from jaxtrain.ops.loss.cross_entropy import DeferredLogits
from jaxtrain.remat.policy import KEEP_ALL

Memory = tuple[jax.Array, jax.Array]  # keys and values of the encoder's output [B, S, G, K]


class CrossAttention(Attention):
    """Attention of the decoder's positions to those of the encoder's output; it knows no distances."""

    def memory(self, memory_BSD: jax.Array) -> Memory:
        """Compute the keys and values [B, S, G, K] of the encoder's output."""
        heads = ("batch", "sequence", "activation_kv_heads", None)
        key, value = (constrain(layer(memory_BSD), *heads) for layer in (self.key, self.value))
        return checkpoint_name(key, "key"), checkpoint_name(value, "value")

    def attend_to(self, x_BTD: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, mask_BTS: jax.Array) -> jax.Array:
        """Attend from x to keys and values, of which each position sees those that the mask marks: [B, T, D]."""
        heads = ("batch", "sequence", "activation_heads", None)
        q_BTHK = checkpoint_name(constrain(self.scaled(self.query(x_BTD)), *heads), "query")
        y_BTHK = checkpoint_name(attention(q_BTHK, k_BSGK, v_BSGK, mask_BTS), "attention_output")
        return checkpoint_name(self.output(constrain(y_BTHK, *heads)), "attention_projection")


class DecoderBlock(Block):
    """The transformer's block with attention to the encoder's output between its self-attention and its MLP."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, stddevs: Stddevs):
        super().__init__(config, rngs, stddevs)
        self.cross_attention_norm = block_norm(config)
        self.cross_attention = CrossAttention(config, rngs, stddevs)

    def run(
        self, x_BTD: jax.Array, context: Context, memory: Memory, mask_BTS: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Apply the block; `memory` is of this layer, and the mask marks what each position sees of it."""
        keys = (None, None, None) if key is None else jax.random.split(key, 3)
        x_BTD, cache = self.attend(x_BTD, context, keys[0])
        with jax.named_scope("cross_attention"):
            inner_BTD = self.inner(self.cross_attention_norm(x_BTD))
            y_BTD = self.cross_attention.attend_to(inner_BTD, *memory, mask_BTS)
            x_BTD = constrain(x_BTD + dropout(y_BTD, self.dropout, keys[1]), *RESIDUAL)
        x_BTD, _ = self.feed(x_BTD, x_BTD, keys[2])
        return x_BTD, cache


class _Side(nnx.Module):
    """The encoder or the decoder: its blocks, their relative positions and the norm after them."""

    def __init__(self, kind: type[Block], config: TransformerConfig, rngs: nnx.Rngs, stddevs: Stddevs):
        self.relative_positions = relative_table(config, rngs, stddevs.relative)
        self.blocks = make_stack(lambda rngs: kind(config, rngs, stddevs), config.num_layers, rngs)
        self.output_norm = block_norm(config)


class EncoderDecoder(nnx.Module):
    """Embedding, encoder, decoder and output layer."""

    def __init__(self, config: EncoderDecoderConfig, vocab_size: int, remat: Remat, rngs: nnx.Rngs):
        # As in T5 embeddings start with a variance of 1 and kernels with that of their inputs' share; but an embedding
        # that makes the logits without their scale of 1 / sqrt(D) would begin with certainty.
        is_scaled = config.logits_scale is not None or not config.tie_embeddings
        shape, stddevs = (vocab_size, config.embed_dim), fan_in_stddevs if is_scaled else small_stddevs
        self.embedding = nnx.Param(normal(1.0 if is_scaled else INIT_STDDEV)(rngs.params(), shape, jnp.float32))
        self.encoder = _Side(Block, config.encoder_stack, rngs, stddevs(config.encoder_stack))
        self.decoder = _Side(DecoderBlock, config.decoder_stack, rngs, stddevs(config.decoder_stack))
        # Logits of an output layer of its own begin with a variance of 1 too (T5 1.1).
        init = normal(config.embed_dim**-0.5 / (config.logits_scale or 1.0))
        tied = config.tie_embeddings
        self.output = None if tied else nnx.Param(init(rngs.params(), shape[::-1], jnp.float32))
        self.config, self.remat = config, remat

    def _embed(self, tokens_BT: jax.Array, key: jax.Array | None) -> jax.Array:
        with jax.named_scope("embed"):
            x_BTD = embedding_lookup(self.embedding[...], tokens_BT, rows="vocab")
            return constrain(dropout(x_BTD, self.config.dropout, key), *RESIDUAL)

    def encode(self, tokens_BS: jax.Array, segments_BS: jax.Array | None, key: jax.Array | None) -> jax.Array:
        """Apply the encoder: [B, S, D] in the compute dtype."""
        config, length = self.config.encoder_stack, tokens_BS.shape[1]
        bias_HW = relative_bias(self.encoder.relative_positions, config, length - 1)
        context, layers_key = Context(jnp.arange(length)[None], segments_BS, bias_HW=bias_HW), _fold(key, 1)

        def call(block: Block, x_BSD: jax.Array, index: jax.Array, _: None) -> tuple[jax.Array, None]:
            return block(x_BSD, context, _fold(layers_key, index))[0], None

        with jax.named_scope("encoder"):
            x_BSD = self._embed(tokens_BS, _fold(key, 0))
            x_BSD, _ = scan_stack(self.encoder.blocks, call, x_BSD, path="encoder/blocks", remat=self.remat)
            return Block.inner(self.encoder.output_norm(x_BSD))

    def write(self, inputs: dict[str, jax.Array], memory_BSD: jax.Array, key: jax.Array | None) -> jax.Array:
        """Apply the decoder to whole outputs that are known: [B, T, D], of which `head` makes logits."""
        tokens_BT, segments_BT = inputs["decoder_tokens"], inputs.get("decoder_segments")
        length = tokens_BT.shape[1]
        mask_BTS = _memory_mask(inputs.get("segments"), segments_BT, length, memory_BSD.shape[1])
        bias_HW = relative_bias(self.decoder.relative_positions, self.config.decoder_stack, length - 1)
        context, layers_key = Context(jnp.arange(length)[None], segments_BT, bias_HW=bias_HW), _fold(key, 3)

        def call(block: DecoderBlock, x_BTD: jax.Array, index: jax.Array, _: None) -> tuple[jax.Array, None]:
            memory = block.cross_attention.memory(memory_BSD)
            return block.run(x_BTD, context, memory, mask_BTS, _fold(layers_key, index))[0], None

        with jax.named_scope("decoder"):
            x_BTD = self._embed(tokens_BT, _fold(key, 2))
            return scan_stack(self.decoder.blocks, call, x_BTD, path="decoder/blocks", remat=self.remat)[0]

    def head(self, x_BTD: jax.Array) -> DeferredLogits:
        """Apply the final norm; the logits [B, T, V] of the output layer are deferred."""
        with jax.named_scope("output"):
            x_BTD = self.decoder.output_norm(x_BTD)
            if self.config.logits_scale is not None:
                x_BTD = scaled(x_BTD, self.config.logits_scale)
            if self.output is None:
                return DeferredLogits(x_BTD, self.embedding[...], tied=True)
            return DeferredLogits(x_BTD, self.output[...])

    def remember(self, tokens_BS: jax.Array, lengths_B: jax.Array) -> Cache:
        """Encode inputs, and compute the keys and values of their outputs for every layer of the decoder.

        Gives `cross_key` and `cross_value` [num_decoder_layers, B, S, G, K], and `segments` [B, S], 0 at padding.
        """
        segments_BS = (jnp.arange(tokens_BS.shape[1])[None] < lengths_B[:, None]).astype(jnp.int32)
        memory_BSD = self.encode(tokens_BS, segments_BS, None)

        def call(block: DecoderBlock, carry: None, index: jax.Array, _: None) -> tuple[None, Memory]:
            return carry, block.cross_attention.memory(memory_BSD)

        blocks = self.decoder.blocks
        _, (key, value) = scan_stack(blocks, call, None, path="decoder/blocks", remat=KEEP_ALL)
        return {"cross_key": key, "cross_value": value, "segments": segments_BS}

    def decode(self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Apply the decoder to new tokens, whose keys and values are written to the cache.

        The cache holds keys and values of earlier positions, and what `remember` gave. Returns logits [B, T, V].
        """
        config = self.config.decoder_stack
        mask_BTS = _memory_mask(cache["segments"], None, tokens_BT.shape[1], cache["segments"].shape[1])
        bias_HW = relative_bias(self.decoder.relative_positions, config, config.relative_max_distance)

        def call(block: DecoderBlock, carry: Any, index: jax.Array, memory: Memory) -> tuple[Any, None]:
            x_BTD, arrays = carry
            context = Context(positions_BT, bias_HW=bias_HW, cache=LayerCache(arrays, index))
            x_BTD, own = block.run(x_BTD, context, memory, mask_BTS, None)
            assert own is not None
            return (x_BTD, own.arrays), None

        read = ("cross_key", "cross_value", "segments")  # what the encoder wrote stays as it is
        memory, written = (cache["cross_key"], cache["cross_value"]), {k: v for k, v in cache.items() if k not in read}
        blocks, carry = self.decoder.blocks, (self._embed(tokens_BT, None), written)
        (x_BTD, written), _ = scan_stack(blocks, call, carry, path="decoder/blocks", remat=KEEP_ALL, per_layer=memory)
        return self.head(x_BTD).logits(), {**cache, **written}


def _fold(key: jax.Array | None, number: jax.Array | int) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, number)


def _memory_mask(
    segments_BS: jax.Array | None, decoder_segments_BT: jax.Array | None, num_queries: int, num_keys: int
) -> jax.Array:
    """Mark which positions of the encoder each of the decoder sees: bool [B or 1, T, S].

    Packed documents see their own inputs; without numbers of the decoder's documents, padding alone is hidden.
    """
    if segments_BS is None:
        return jnp.ones((1, num_queries, num_keys), bool)
    if decoder_segments_BT is None:
        return jnp.broadcast_to((segments_BS != 0)[:, None], (segments_BS.shape[0], num_queries, num_keys))
    return decoder_segments_BT[:, :, None] == segments_BS[:, None]


def encoder_decoder(
    config: EncoderDecoderConfig,
    *,
    input_shape: tuple[int, ...] = (),
    vocab_size: int | None = None,
    num_outputs: int | None = None,
    remat: Remat | None = None,
) -> Model:
    """Make the encoder-decoder as a `Model`.

    Its inputs are a dict of int32 `tokens` [B, S] and `decoder_tokens` [B, T], and optionally `segments` [B, S] and
    `decoder_segments` [B, T]: numbers of packed documents, 0 for padding. Its outputs are logits [B, T, V] in the
    compute dtype.
    """
    vocabulary = size_of("vocab_size", config.vocab_size, vocab_size)

    def make(rngs: nnx.Rngs) -> EncoderDecoder:
        return EncoderDecoder(config, vocabulary, remat or KEEP_ALL, rngs)

    def call(module: Any, inputs: Any, key: jax.Array | None, train: bool) -> DeferredLogits:
        takes = ("segments", "decoder_segments")
        check_entries(inputs, "encoder_decoder", needs=("tokens", "decoder_tokens"), takes=takes)
        key = key if train else None
        memory_BSD = module.encode(inputs["tokens"], inputs.get("segments"), key)
        return module.head(module.write(inputs, memory_BSD, key))

    graph, template = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def module(params: Params) -> EncoderDecoder:
        return nnx.merge(graph, from_dict(template, params))

    def encode(params: Params, tokens_BS: jax.Array, lengths_B: jax.Array, cache: Cache) -> Cache:
        return {**cache, **module(params).remember(tokens_BS, lengths_B)}

    def decode(params: Params, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        logits, cache = module(params).decode(tokens_BT, positions_BT, cache)
        return logits.astype(jnp.float32), cache

    make_cache = functools.partial(init_cache, config.decoder_stack)
    model = from_nnx(
        make,
        axes=model_tensors(config, vocab_size=vocabulary).axes,
        call=DrawsByRow(call),
        name=config.size or "encoder_decoder",
        gathers_itself=("encoder/blocks", "decoder/blocks"),
    )
    return dataclasses.replace(
        model,
        apply=DefersLogits(model.apply),
        decoder=Decoder(make_cache, decode, config.max_sequence_length, encode=encode, start_token=config.start_token),
        vocab_size=vocabulary,
        num_outputs=vocabulary,
    )
