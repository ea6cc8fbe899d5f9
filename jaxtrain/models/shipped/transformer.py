"""A transformer of equal blocks, as a decoder or as an encoder: embeddings, blocks, head.

Shapes: B batch, L length, P longest prompt, C tokens of a chunk of it, T new tokens, D model width, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config.arguments import shown
from jaxtrain.config.model import TransformerConfig
from jaxtrain.config.rope import LongRope
from jaxtrain.config.schema import Remat
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import constrain
from jaxtrain.models.from_nnx import from_dict, from_stages, make_stack, scan_stack
from jaxtrain.models.initializers import INIT_STDDEV, normal
from jaxtrain.models.layers import Linear, dropout, scaled
from jaxtrain.models.model import NOWHERE, Decoder, DrawsByRow, Model, Params
from jaxtrain.models.shipped.block import (
    RESIDUAL,
    Block,
    Cache,
    Context,
    LayerCache,
    block_norm,
    init_cache,
    relative_bias,
    relative_table,
    small_stddevs,
)
from jaxtrain.models.shipped.heads import (
    HeadInputs,
    MaskedLanguageModelHead,
    PooledHead,
    head_inputs,
    num_labels,
)
from jaxtrain.models.shipped.moe import Routing
from jaxtrain.models.shipped.shapes import embedding_projection_shape, model_tensors, size_of
from jaxtrain.ops.embedding import embedding_lookup
from jaxtrain.ops.loss.cross_entropy import DeferredLogits
from jaxtrain.remat.policy import KEEP_ALL

# Tokens of a prompt that are read at a time: the scores of a chunk are in memory, not those of the prompt.
PREFILL_CHUNK = 512
# `local`, `rotated` and `first` of the context of a layer, or of all layers.
_LayerKind = dict[str, Any]


def check_entries(inputs: Any, kind: str, *, needs: tuple[str, ...], takes: tuple[str, ...]) -> None:
    """Raise where inputs are no dict of integers by these names: a mask that is not read would go unnoticed."""
    known = (*needs, *takes)
    fits = isinstance(inputs, dict) and set(needs) <= set(inputs) <= set(known)
    if not fits or not all(jnp.issubdtype(value.dtype, jnp.integer) for value in jax.tree.leaves(inputs)):
        found = ", ".join(inputs) if isinstance(inputs, dict) else shown(inputs)
        raise ConfigError(f"the {kind} takes integers {', '.join(known)} [B, L], not {found}")


def _read(inputs: Any, config: TransformerConfig) -> dict[str, jax.Array]:
    """The entries of a batch's inputs [B, L], and `positions` [B or 1, L] of their own where it gives none."""
    inputs = inputs if isinstance(inputs, dict) else {"tokens": inputs}
    others = ("positions", "segments", "token_types") if config.token_types else ("positions", "segments")
    check_entries(inputs, "transformer", needs=("tokens",), takes=others)
    given = {name: value for name, value in inputs.items() if value is not None}
    return {"positions": _positions(inputs["tokens"], inputs.get("segments"), config), **given}


def _positions(tokens_BL: jax.Array, segments_BL: jax.Array | None, config: TransformerConfig) -> jax.Array:
    """Indices in the row; they begin again in each segment if more than the distance of two tokens counts."""
    indices_1L = jnp.arange(tokens_BL.shape[1])[None]
    is_chunked = config.local_layers is not None and config.local_layers.chunked
    is_absolute = config.position == "learned" or config.attention_temperature is not None or is_chunked
    if segments_BL is None or not is_absolute:
        return indices_1L
    # Counted: comparing neighbours of a sharded row would permute data between devices inside a pipeline's stage.
    keys_BS = constrain(segments_BL, "batch", None)
    is_earlier_LS = indices_1L < indices_1L.T
    return jnp.sum((segments_BL[:, :, None] == keys_BS[:, None]) & is_earlier_LS, axis=-1, dtype=jnp.int32)


class Transformer(nnx.Module):
    """Embedding, stacked blocks, norm, and output layer or another head."""

    def __init__(self, config: TransformerConfig, vocab_size: int, labels: int | None, rngs: nnx.Rngs):
        width = config.table_width

        def table(*shape: int) -> nnx.Param:
            return nnx.Param(normal(INIT_STDDEV)(rngs.params(), shape, jnp.float32))

        self.embedding = table(vocab_size, width)
        num_positions = config.max_sequence_length + config.position_offset
        self.positions = table(num_positions, width) if config.position == "learned" else None
        self.token_types = table(config.token_types, width) if config.token_types else None
        self.relative_positions = relative_table(config, rngs)
        self.embedding_norm = block_norm(config, width) if config.embedding_norm is True else None
        self.embedding_projection = _projection(config, rngs)
        self.leading = None if config.leading is None else _leading(config, config.leading, rngs)
        self.blocks = make_stack(lambda rngs: Block(config, rngs), config.num_layers, rngs)
        # After the last block of this form the residual stream is normalized already.
        self.output_norm = None if config.block == "post" else block_norm(config)
        own_output = config.has_output_layer and not config.tie_embeddings
        self.output = table(config.output_width, vocab_size) if own_output else None
        biased = config.has_output_layer and config.output_bias
        self.output_bias = nnx.Param(jnp.zeros((vocab_size,), jnp.float32)) if biased else None
        self.head = _head(config, vocab_size, labels, rngs)
        self.config = config

    def embed(self, inputs: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
        """Look up the embeddings of tokens, and add those of positions and token types: [B, L, D]."""
        config, tokens_BL = self.config, inputs["tokens"]
        with jax.named_scope("embed"):
            x_BLD = embedding_lookup(self.embedding[...], tokens_BL, rows="vocab")
            if config.embedding_scale is not None:
                x_BLD = x_BLD * jnp.asarray(config.embedding_scale, x_BLD.dtype)
            if self.positions is not None:
                positions_BL = inputs["positions"] + config.position_offset
                x_BLD = x_BLD + embedding_lookup(self.positions[...], positions_BL, rows=None)
            if self.token_types is not None:
                types_BL = inputs.get("token_types", jnp.zeros_like(tokens_BL))
                x_BLD = x_BLD + embedding_lookup(self.token_types[...], types_BL, rows=None)
            if self.embedding_norm is not None:
                x_BLD = self.embedding_norm(x_BLD)
            x_BLD = dropout(x_BLD, config.dropout, key)
            if self.embedding_projection is not None:
                x_BLD = self.embedding_projection(x_BLD)
            return constrain(x_BLD, *RESIDUAL)

    def outputs(self, x_BLD: jax.Array, needs: HeadInputs) -> jax.Array | DeferredLogits:
        """Apply the final norm and the head; logits [B, L, V] of the vocabulary are deferred."""
        with jax.named_scope("output"):
            x_BLD = x_BLD if self.output_norm is None else self.output_norm(x_BLD)
            return self.head(x_BLD, needs) if isinstance(self.head, PooledHead) else self._logits(x_BLD)

    def _logits(self, x_BLD: jax.Array) -> DeferredLogits:
        bias = None if self.output_bias is None else self.output_bias[...]
        if isinstance(self.head, MaskedLanguageModelHead):
            x_BLD = self.head(x_BLD)
            bias = None if self.head.bias is None else self.head.bias[...]
        if self.config.logits_scale is not None:
            x_BLD = scaled(x_BLD, self.config.logits_scale)
        tied = self.output is None
        kernel = self.embedding[...] if self.output is None else self.output[...]
        return DeferredLogits(x_BLD, kernel, tied=tied, bias=bias, softcap=self.config.logits_softcap)

    def decode(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Cache, *, only_B: jax.Array | None = None
    ) -> tuple[DeferredLogits, Cache]:
        """Apply the model to new tokens, whose keys and values are written to the cache.

        `only_B` is the index of the one token of each row whose logits [B, 1, V] are computed; None: all [B, T, V].
        """
        config = self.config
        bias_HW = relative_bias(self.relative_positions, config, config.relative_max_distance)

        def call(block: Block, carry: Any, index: jax.Array, kind: _LayerKind | None) -> tuple[Any, None]:
            x_BTD, arrays = carry
            context = Context(positions_BT, bias_HW=bias_HW, cache=LayerCache(arrays, index), **kind or {})
            x_BTD, _, own = block(x_BTD, context)
            assert own is not None
            return (x_BTD, own.arrays), None

        start = (self.embed({"tokens": tokens_BT, "positions": positions_BT}, None), cache)
        kinds, first, remat = _layer_kinds(config), config.depth - config.num_layers, KEEP_ALL
        if self.leading is not None:
            start, _ = scan_stack(self.leading, call, start, path="leading", remat=remat)
        (x_BTD, cache), _ = scan_stack(
            self.blocks, call, start, path="blocks", remat=remat, per_layer=kinds, first_layer=first
        )
        if only_B is not None:  # the vocabulary is what a prompt of many tokens would have no memory for
            x_BTD = jnp.take_along_axis(x_BTD, only_B[:, None, None], axis=1)
        logits = self.outputs(x_BTD, HeadInputs())
        assert isinstance(logits, DeferredLogits), "a model with another head has no decoder"
        return logits, cache

    def prefill(self, prompts_BP: jax.Array, lengths_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Read prompts that are padded on the right: float32 logits [B, V] of the last token of each, and the cache."""

        def chunk(start: jax.Array | int, tokens_BC: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
            """Logits of the last token of each row that has it in the chunk."""
            positions_BC = start + jnp.broadcast_to(jnp.arange(tokens_BC.shape[1]), tokens_BC.shape)
            positions_BC = jnp.where(positions_BC < lengths_B[:, None], positions_BC, NOWHERE)
            last_B = jnp.clip(lengths_B - 1 - start, 0, tokens_BC.shape[1] - 1)
            logits, cache = self.decode(tokens_BC, positions_BC, cache, only_B=last_B)
            return logits.logits()[:, 0].astype(jnp.float32), cache

        if prompts_BP.shape[1] <= PREFILL_CHUNK:
            return chunk(0, prompts_BP, cache)
        padded_BP = jnp.pad(prompts_BP, ((0, 0), (0, -prompts_BP.shape[1] % PREFILL_CHUNK)))

        def advance(number: jax.Array, carry: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
            logits_BV, cache = carry
            start = number * PREFILL_CHUNK
            tokens_BC = jax.lax.dynamic_slice_in_dim(padded_BP, start, PREFILL_CHUNK, axis=1)
            new_BV, cache = chunk(start, tokens_BC, cache)
            return jnp.where(((lengths_B - 1) // PREFILL_CHUNK == number)[:, None], new_BV, logits_BV), cache

        empty_BV = jnp.zeros((prompts_BP.shape[0], self.embedding.shape[0]), jnp.float32)
        chunks = -(-jnp.max(lengths_B) // PREFILL_CHUNK)
        return jax.lax.fori_loop(0, chunks, advance, (empty_BV, cache))


def _projection(config: TransformerConfig, rngs: nnx.Rngs) -> Linear | None:
    """The layer after the embeddings, where they have a width of their own."""
    shape, init = embedding_projection_shape(config), normal(INIT_STDDEV)
    if shape is None:
        return None
    return Linear(shape.inputs, shape.outputs, bias=True, initializer=init, rngs=rngs, low_precision=False)


def _head(
    config: TransformerConfig, vocab_size: int, labels: int | None, rngs: nnx.Rngs
) -> MaskedLanguageModelHead | PooledHead | None:
    """The head of the model; None for the output layer alone."""
    match config.head_kind:
        case "language_model":
            return None
        case "masked_language_model":
            return MaskedLanguageModelHead(config, vocab_size, rngs)
        case _:
            return PooledHead(config, labels, rngs)


def _leading(config: TransformerConfig, leading: TransformerConfig, rngs: nnx.Rngs) -> nnx.Module:
    """The stack of the blocks before those with experts."""
    return make_stack(lambda rngs: Block(leading, rngs, small_stddevs(config)), leading.num_layers, rngs)


def _layer_kinds(config: TransformerConfig) -> _LayerKind | None:
    """Which layers are local, have rotary positions, and norm the embeddings, bool [num_layers]; None: all alike."""
    kinds: _LayerKind = {}
    if config.local_layers is not None:
        kinds["local"] = np.array([window is not None for window in config.windows])
    if config.rope_layers is not None:
        kinds["rotated"] = np.resize(np.array(config.rope_layers, bool), config.num_layers)
    if config.embedding_norm == "first_layer":
        kinds["first"] = np.arange(config.num_layers) == 0
    return kinds or None


def _embed(
    config: TransformerConfig, module: Transformer, inputs: Any, key: jax.Array | None, train: bool, remat: Remat
) -> Any:
    """The residual stream before the main stack, and what travels beside it; most models have nothing there."""
    read = _read(inputs, config)
    tokens_BL, segments_BL = read["tokens"], read.get("segments")
    length, scaling = tokens_BL.shape[1], config.rope_scaling if config.position == "rotary" else None
    if length > config.max_sequence_length and config.position == "learned":
        raise ConfigError(f"sequence length {length} exceeds model.max_sequence_length={config.max_sequence_length}")
    if segments_BL is not None and isinstance(scaling, LongRope) and length > scaling.original_length:
        raise ConfigError(
            f"longrope rotates by the length of a row, and packed or padded rows of {length} tokens hold shorter texts "
            f"too; use rows of up to original_length={scaling.original_length} tokens, or of one text each"
        )
    key = key if train else None
    x_BLD = module.embed(read, key)
    head_key = None if key is None else jax.random.fold_in(key, 1)
    needs = head_inputs(config.head, tokens_BL.shape, segments_BL, head_key)
    beside: dict[str, Any] = {}
    if config.experts is not None:
        beside["routing"] = Routing.none(tokens_BL)
    beside |= {"head": needs} if jax.tree.leaves(needs) else {}
    # Every stage of a pipeline needs it, and only the first has the table.
    bias_HW = relative_bias(module.relative_positions, config, length - 1)
    beside |= {} if bias_HW is None else {"bias": bias_HW}
    if module.leading is not None:
        context = Context(read["positions"], segments_BL, bias_HW=bias_HW)
        layers_key = None if key is None else jax.random.fold_in(key, 2)

        def call(block: Block, x_BLD: jax.Array, index: jax.Array, _: None) -> tuple[jax.Array, None]:
            layer_key = None if layers_key is None else jax.random.fold_in(layers_key, index)
            return block(x_BLD, context, layer_key)[0], None

        x_BLD, _ = scan_stack(module.leading, call, x_BLD, path="leading", remat=remat)
    return {"x": x_BLD, **beside} if beside else x_BLD


def _block(
    config: TransformerConfig, block: Block, carry: Any, inputs: Any, key: jax.Array | None, kind: _LayerKind | None
) -> Any:
    """What `_embed` gave, after a block."""
    read, beside = _read(inputs, config), carry if isinstance(carry, dict) else {"x": carry}
    context = Context(read["positions"], read.get("segments"), bias_HW=beside.get("bias"), **kind or {})
    x_BLD, routing, _ = block(beside["x"], context, key)
    if not isinstance(carry, dict):
        return x_BLD
    summed = {} if routing is None else {"routing": jax.tree.map(jnp.add, carry["routing"], routing)}
    return {**carry, "x": x_BLD, **summed}


def transformer(
    config: TransformerConfig,
    *,
    input_shape: tuple[int, ...] = (),
    vocab_size: int | None = None,
    num_outputs: int | None = None,
    remat: Remat | None = None,
) -> Model:
    """Make the transformer as a `Model`.

    Its inputs are int32 tokens [B, L], or a dict of `tokens`, and optionally `positions`, `segments` (packed documents
    or padding) and `token_types` [B, L]. Without `positions` they begin again in each segment. Its outputs are logits
    [B, L, V] in the compute dtype; with experts they are a dict of `logits` and the entries of `Routing.outputs`.
    Another head gives one array: labels or numbers [B, C], labels per token [B, L, C], or embeddings [B, D].
    """
    vocabulary = size_of("vocab_size", config.vocab_size, vocab_size)
    labels = None if config.head is None else num_labels(config.head, num_outputs)

    def make(rngs: nnx.Rngs) -> Transformer:
        return Transformer(config, vocabulary, labels, rngs)

    def embed(module: Transformer, inputs: Any, key: jax.Array | None, train: bool) -> Any:
        return _embed(config, module, inputs, key, train, remat or KEEP_ALL)

    def block(
        block: Block, carry: Any, inputs: Any, key: jax.Array | None, train: bool, kind: _LayerKind | None = None
    ) -> Any:
        return _block(config, block, carry, inputs, key if train else None, kind)

    def head(module: Transformer, carry: Any, train: bool) -> Any:
        carry = carry if isinstance(carry, dict) else {"x": carry}
        outputs = module.outputs(carry["x"], carry.get("head", HeadInputs()))
        if config.experts is None:
            return outputs
        return {"logits": outputs, **carry["routing"].outputs(config.num_layers, train=train)}

    built = from_stages(
        make,
        stack="blocks",
        embed=DrawsByRow(embed),
        block=DrawsByRow(block),
        head=head,
        axes=model_tensors(config, vocab_size=vocabulary, num_outputs=labels).axes,
        remat=remat,
        name=config.size or "transformer",
        per_layer=_layer_kinds(config),
    )
    # An encoder predicts no next token, and neither does another head.
    predicts = config.causal and config.head_kind == "language_model"
    return dataclasses.replace(
        built,
        decoder=_decoder(config, make) if predicts else None,
        gathers_itself=("blocks",) if config.leading is None else ("leading", "blocks"),
        has_experts=config.experts is not None,
        score_bias_step=config.experts.score_bias_step if config.experts and config.experts.score_bias else None,
        vocab_size=vocabulary,
        num_outputs=vocabulary if config.has_output_layer else labels or config.embed_dim,
    )


def _decoder(config: TransformerConfig, make: Any) -> Decoder:
    """How the transformer that `make` makes generates."""
    graph, template = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def module(params: Params) -> Transformer:
        return nnx.merge(graph, from_dict(template, params))

    def decode(params: Params, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        logits, cache = module(params).decode(tokens_BT, positions_BT, cache)
        return logits.logits().astype(jnp.float32), cache

    scaling = config.rope_scaling if config.position == "rotary" else None
    return Decoder(
        lambda batch, length, dtype: init_cache(config, batch, length, dtype),
        decode,
        config.max_sequence_length,
        short_length=scaling.original_length if isinstance(scaling, LongRope) else None,
        prefill=lambda params, *given: module(params).prefill(*given),
        deferred=lambda params, *given: module(params).decode(*given),
        keeps_positions=config.state_space is None,
    )
