"""The block of every shipped transformer: attention and an MLP, with settings that are independent of each other.

Shapes: B batch, L length, S length of keys and values (L, or the positions of a cache), D model width, H query heads,
G key-value heads, K head_dim, F mlp width, N buckets of relative positions, W distances of keys and queries.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config.model import TransformerConfig
from jaxtrain.layout.sharding import constrain, current_layout, platform
from jaxtrain.models.decoder import NOWHERE
from jaxtrain.models.initializers import Initializer, normal
from jaxtrain.models.layers import Linear, Norm, dropout, long_documents, model_frequencies, rotary_factor, rotate
from jaxtrain.models.shipped.cache import LayerCache, read_cache, ring_positions, unrolled_on, write_cache
from jaxtrain.models.shipped.moe import MoE, Routing
from jaxtrain.models.shipped.shapes import LinearShape, attention_shapes, has_bias, mlp_shapes
from jaxtrain.ops.attention.reference import (
    BLOCK,
    CachedKeys,
    attention_mask,
    bias_at,
    cached_attention,
    cached_attention_in_blocks,
    distance_bias,
)
from jaxtrain.ops.attention.rules import AttentionForm
from jaxtrain.ops.attention.table import self_attention
from jaxtrain.ops.elementwise import gelu
from jaxtrain.precision.kernels import LowRankKernel

# The residual stream between blocks; its sequence is also sharded over `tensor` where sequence parallelism is on.
RESIDUAL = ("batch", "residual_sequence", "activation_embed")


INIT_STDDEV = 0.02  # GPT-2, Radford et al. 2019


@dataclass(frozen=True)
class Stddevs:
    """Standard deviations of the kernels of a stack."""

    query: float  # of the layer that makes queries
    key_value: float  # of those that make keys and values
    attention_output: float  # of the layer after attention
    up: float  # of the first layers of the MLP, gate and experts included
    down: float  # of its last layer
    relative: float  # of the table of relative positions


def small_stddevs(config: TransformerConfig) -> Stddevs:
    """Those of GPT-2: the deeper the model, the smaller the outputs to the residual stream start (section 2.3)."""
    out = INIT_STDDEV / math.sqrt(2 * config.num_layers)
    return Stddevs(INIT_STDDEV, INIT_STDDEV, out, INIT_STDDEV, out, INIT_STDDEV)


def fan_in_stddevs(config: TransformerConfig) -> Stddevs:
    """Those of T5, for embeddings of variance 1: outputs to the residual stream are as large as the embeddings.

    Smaller ones would leave the embedding of the token itself in the stream, which tied embeddings then name as the
    next token with certainty. Queries start smaller by the scale that T5 leaves out of the scores.
    """
    width, head_dim = config.embed_dim**-0.5, config.head_width
    scale = head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    return Stddevs(
        query=width * head_dim**-0.5 / scale,
        key_value=width,
        attention_output=(config.num_heads * head_dim) ** -0.5,
        up=width,
        down=config.mlp_width**-0.5,
        relative=width,
    )


def relative_table(config: TransformerConfig, rngs: nnx.Rngs, stddev: float = INIT_STDDEV) -> nnx.Param | None:
    """Draw the table [N, H] of a stack, where its positions are relative."""
    if config.position != "relative":
        return None
    shape = (config.relative_buckets, config.num_heads)
    return nnx.Param(normal(stddev)(rngs.params(), shape, jnp.float32))


def relative_bias(table: nnx.Param | None, config: TransformerConfig, reach: int) -> jax.Array | None:
    """What every block adds to its scores: float32 [H, W] for the W = 2 * reach + 1 distances, or None."""
    if table is None:
        return None
    with jax.named_scope("relative_positions"):
        bias_HW = distance_bias(table[...], reach, max_distance=config.relative_max_distance, causal=config.causal)
        return constrain(bias_HW, "activation_heads", None)


def block_norm(config: TransformerConfig) -> Norm:
    """A norm of the residual stream."""
    bias = config.bias is True
    return Norm(config.embed_dim, kind=config.norm, bias=bias, epsilon=config.norm_epsilon, offset=config.norm_offset)


def _head_norm(config: TransformerConfig) -> Norm | None:
    """The norm of the queries or keys of each head, where the model has it."""
    if not config.qk_norm:
        return None
    return Norm(config.head_width, kind="rmsnorm", bias=False, epsilon=config.norm_epsilon, offset=config.norm_offset)


def _linear(
    config: TransformerConfig, name: str, shape: LinearShape, initializer: Initializer, rngs: nnx.Rngs
) -> Linear:
    return Linear(shape.inputs, shape.outputs, bias=has_bias(config, name), initializer=initializer, rngs=rngs)


class Attention(nnx.Module):
    """Self-attention with grouped-query heads."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, stddevs: Stddevs):
        shapes = attention_shapes(config)
        self.query = _linear(config, "query", shapes["query"], normal(stddevs.query), rngs)
        self.key = _linear(config, "key", shapes["key"], normal(stddevs.key_value), rngs)
        self.value = _linear(config, "value", shapes["value"], normal(stddevs.key_value), rngs)
        self.output = _linear(config, "output", shapes["output"], normal(stddevs.attention_output), rngs)
        self.query_norm, self.key_norm = _head_norm(config), _head_norm(config)
        self.config = config

    def __call__(
        self,
        x_BLD: jax.Array,
        positions_BL: jax.Array,
        segments_BL: jax.Array | None,
        local: jax.Array | None,
        cache: LayerCache | None,
        bias_HW: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        length = x_BLD.shape[1] if cache is None else cache.length
        q_BLHK = self.query(x_BLD)
        k_BSGK, v_BSGK = self.key(x_BLD), self.value(x_BLD)
        scaling = self.config.rope_scaling
        long_BL = long_documents(scaling, positions_BL, segments_BL) if cache is None else None
        q_BLHK, k_BSGK = self._positioned(q_BLHK, k_BSGK, positions_BL, local, length, long_BL)
        q_BLHK = checkpoint_name(constrain(q_BLHK, "batch", "sequence", "activation_heads", None), "query")
        k_BSGK = checkpoint_name(constrain(k_BSGK, "batch", "sequence", "activation_kv_heads", None), "key")
        v_BSGK = checkpoint_name(constrain(v_BSGK, "batch", "sequence", "activation_kv_heads", None), "value")
        if cache is None:
            y_BLHK = self._attend(q_BLHK, k_BSGK, v_BSGK, segments_BL, local, bias_HW)
        else:
            cache = write_cache(cache, k_BSGK, v_BSGK, positions_BL)
            y_BLHK = self._attend_to_cache(q_BLHK, positions_BL, cache, local, bias_HW)
        y_BLHK = constrain(y_BLHK, "batch", "sequence", "activation_heads", None)
        return checkpoint_name(self.output(y_BLHK), "attention_projection"), cache

    def _positioned(
        self,
        q_BLHK: jax.Array,
        k_BLGK: jax.Array,
        positions_BL: jax.Array,
        local: jax.Array | None,
        length: int,
        long_BL: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Queries and keys with their norms, their positions and the scale of the scores."""
        config = self.config
        if self.query_norm is not None and self.key_norm is not None:
            q_BLHK, k_BLGK = self.query_norm(q_BLHK), self.key_norm(k_BLGK)
        if config.position == "rotary":
            frequencies = model_frequencies(config, local, length=length, long_BL=long_BL)
            factor = rotary_factor(config.rope_scaling, max_length=config.max_sequence_length)
            q_BLHK = rotate(q_BLHK, positions_BL, frequencies, factor=factor)
            k_BLGK = rotate(k_BLGK, positions_BL, frequencies, factor=factor)
        return self.scaled(q_BLHK), k_BLGK

    def scaled(self, q_BLHK: jax.Array) -> jax.Array:
        """Queries for scores of `attention_scale`: every kernel scales by 1 / sqrt(K), what is left goes into them."""
        config = self.config
        scale = 1.0 if config.attention_scale is None else config.attention_scale * math.sqrt(config.head_width)
        if math.isclose(scale, 1.0):
            return q_BLHK
        return (q_BLHK.astype(jnp.float32) * scale).astype(q_BLHK.dtype)

    def _window(self, local: jax.Array | None, length: int) -> jax.Array | int | None:
        """The window of this layer; one of `length` sees all."""
        config = self.config
        if local is None or config.local_layers is None:
            return config.windows[0]
        return jnp.where(local, config.local_layers.window, length)

    def _attend_to_cache(
        self,
        q_BLHK: jax.Array,
        positions_BL: jax.Array,
        cache: LayerCache,
        local: jax.Array | None,
        bias_HW: jax.Array | None,
    ) -> jax.Array:
        """Attend to the positions of a cache, at or before each query's own."""
        if cache.ring_layer is not None:
            if cache.layer is None:
                return self._attend_to_ring(q_BLHK, positions_BL, cache)
            assert local is not None
            if isinstance(local, np.bool_):  # layers are written out
                return (
                    self._attend_to_ring(q_BLHK, positions_BL, cache)
                    if local
                    else self._attend_to_all(q_BLHK, positions_BL, cache, None, bias_HW)
                )
            return jax.lax.cond(
                local,
                lambda: self._attend_to_ring(q_BLHK, positions_BL, cache),
                lambda: self._attend_to_all(q_BLHK, positions_BL, cache, None, bias_HW),
            )
        return self._attend_to_all(q_BLHK, positions_BL, cache, self._window(local, cache.length), bias_HW)

    def _attend_to_ring(self, q_BLHK: jax.Array, positions_BL: jax.Array, cache: LayerCache) -> jax.Array:
        """Attend to the positions of a window that its ring holds."""
        size, window = cache.ring_size, max(window or 0 for window in self.config.windows)
        assert q_BLHK.shape[1] <= size - window + 1, "a chunk that its ring has no room for"

        def keys(first: jax.Array | int, count: int) -> CachedKeys:
            # The last block begins where it is whole.
            start = first if isinstance(first, int) else jnp.minimum(first, size - count)
            places_S = start + jnp.arange(count)
            (k_BGSK, key_scale_BGS), (v_BGSK, value_scale_BGS) = (
                read_cache(cache, name, start=start, size=count, ring=True) for name in ("key", "value")
            )
            order_BS = ring_positions(positions_BL, places_S, size)
            mask_BLS = attention_mask(positions_BL, order_BS, causal=True, window=window)
            mask_BLS = mask_BLS & ((order_BS >= 0) & (places_S >= first))[:, None]
            return CachedKeys(k_BGSK, v_BGSK, mask_BLS, key_scale_BGS, value_scale_BGS)

        softcap = self.config.attention_softcap
        if size <= 2 * BLOCK or platform() in unrolled_on(q_BLHK.shape[1]):
            return cached_attention(q_BLHK, keys(0, size), softcap=softcap)
        # Until the ring is full its last blocks hold nothing.
        last = jnp.minimum(jnp.max(jnp.where(positions_BL < NOWHERE, positions_BL, 0)), size - 1)
        blocks = last // BLOCK + 1
        return cached_attention_in_blocks(q_BLHK, lambda number: keys(number * BLOCK, BLOCK), blocks, softcap=softcap)

    def _attend_to_all(
        self,
        q_BLHK: jax.Array,
        positions_BL: jax.Array,
        cache: LayerCache,
        window: jax.Array | int | None,
        bias_HW: jax.Array | None,
    ) -> jax.Array:
        """Attend to a cache of all positions, of which a window is seen."""
        length = cache.length

        def keys(first: jax.Array | int, size: int) -> CachedKeys:
            # The last block begins where it is whole.
            start = first if isinstance(first, int) else jnp.minimum(first, length - size)
            order_S = start + jnp.arange(size)
            (k_BGSK, key_scale_BGS), (v_BGSK, value_scale_BGS) = (
                read_cache(cache, name, start=start, size=size) for name in ("key", "value")
            )
            mask_BLS = attention_mask(positions_BL, order_S[None], causal=True, window=window) & (
                order_S[None, None] >= first
            )
            bias_BHLS = None if bias_HW is None else bias_at(bias_HW, positions_BL, order_S)
            return CachedKeys(k_BGSK, v_BGSK, mask_BLS, key_scale_BGS, value_scale_BGS, bias_BHLS)

        softcap = self.config.attention_softcap
        # Where layers are written out, a loop over blocks would copy each, and a GPU waits at every turn of a loop.
        if length <= 2 * BLOCK or platform() in unrolled_on(q_BLHK.shape[1]):
            return cached_attention(q_BLHK, keys(0, length), softcap=softcap)
        # Rows beyond the cache are not in use: they do not make the others read all of it.
        last = jnp.max(jnp.where(positions_BL < length, positions_BL, 0))
        blocks = last // BLOCK + 1
        return cached_attention_in_blocks(q_BLHK, lambda number: keys(number * BLOCK, BLOCK), blocks, softcap=softcap)

    def _attend(
        self,
        q_BLHK: jax.Array,
        k_BLGK: jax.Array,
        v_BLGK: jax.Array,
        segments_BL: jax.Array | None,
        local: jax.Array | None,
        bias_HW: jax.Array | None,
    ) -> jax.Array:
        """Attend to the sequence itself; kernels take a window that is a constant, so each kind has a branch."""
        config = self.config

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
            form = AttentionForm(config.causal, window, config.attention_softcap)
            return self_attention(q, k, v, segments_BL, form, bias_HW, implementation=config.attention)

        if local is None or config.local_layers is None:
            return attend(q_BLHK, k_BLGK, v_BLGK, config.windows[0])
        window, layout = config.local_layers.window, current_layout()
        # A ring of permutations may not stand in a branch; a window of all positions is no work for a ring.
        whole = q_BLHK.shape[1] if layout is not None and layout.degree("context") > 1 else None
        return jax.lax.cond(
            local,
            functools.partial(attend, window=window),
            functools.partial(attend, window=whole),
            q_BLHK,
            k_BLGK,
            v_BLGK,
        )


class MLP(nnx.Module):
    """A nonlinearity between two linear layers, or one that a second linear layer gates."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, stddevs: Stddevs):
        shapes = mlp_shapes(config)
        init, init_out = normal(stddevs.up), normal(stddevs.down)
        self.up = _linear(config, "up", shapes["up"], init, rngs)
        self.gate = _linear(config, "gate", shapes["gate"], init, rngs) if "gate" in shapes else None
        self.down = _linear(config, "down", shapes["down"], init_out, rngs)
        self.activation = config.activation

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        h_BLF = self.up(x_BLD)
        h_BLF = activate(h_BLF, self.activation) if self.gate is None else self._gated(self.gate, x_BLD, h_BLF)
        h_BLF = checkpoint_name(constrain(h_BLF, "batch", "sequence", "activation_mlp"), "mlp_hidden")
        return checkpoint_name(self.down(h_BLF), "mlp_output")

    def _gated(self, gate: Linear, x_BLD: jax.Array, up_BLF: jax.Array) -> jax.Array:
        def product(gate_BLF: jax.Array, up_BLF: jax.Array) -> jax.Array:
            return (jax.nn.silu(gate_BLF) if self.activation == "swiglu" else gelu(gate_BLF)) * up_BLF

        if isinstance(gate.kernel.get_value(), LowRankKernel):
            # Of a fine-tuning the activations are most of what a step holds. The backward pass keeps the two factors
            # and computes the sigmoid again, where autodiff keeps six arrays: a fifth of all temporary memory.
            product = jax.checkpoint(product, prevent_cse=False)
        return product(gate(x_BLD), up_BLF)


def activate(x: jax.Array, activation: str) -> jax.Array:
    """Apply a nonlinearity without a gate."""
    match activation:
        case "gelu":
            return gelu(x)
        case "gelu_exact":
            return jax.nn.gelu(x, approximate=False)
        case "relu":
            return jax.nn.relu(x)
        case _:
            raise AssertionError(f"{activation} has a gate")


class Block(nnx.Module):
    """Attention and an MLP (or experts), added to the residual stream in the order of `TransformerConfig.block`."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, stddevs: Stddevs | None = None):
        stddevs = stddevs or small_stddevs(config)
        self.attention_norm = block_norm(config)
        self.attention = Attention(config, rngs, stddevs)
        self.mlp_norm = block_norm(config)
        self.mlp = MLP(config, rngs, stddevs) if config.experts is None else MoE(config, rngs)
        sandwich = config.block == "sandwich"
        self.attention_output_norm = block_norm(config) if sandwich else None
        self.mlp_output_norm = block_norm(config) if sandwich else None
        self.dropout = config.dropout
        self.form = config.block

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
        cache: LayerCache | None = None,
        local: jax.Array | None = None,
        bias_HW: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing | None, LayerCache | None]:
        keys = (None, None) if key is None else jax.random.split(key)
        attended_BLD, cache = self.attend(x_BLD, positions_BL, segments_BL, keys[0], cache, local, bias_HW)
        mlp_input_BLD = x_BLD if self.form == "parallel" else attended_BLD
        x_BLD, routing = self.feed(attended_BLD, mlp_input_BLD, keys[1], segments_BL)
        return x_BLD, routing, cache

    def attend(
        self,
        x_BLD: jax.Array,
        positions_BL: jax.Array,
        segments_BL: jax.Array | None,
        key: jax.Array | None,
        cache: LayerCache | None,
        local: jax.Array | None = None,
        bias_HW: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Add the output of attention to the residual stream."""
        with jax.named_scope("attention"):
            inner_BLD = self.inner(x_BLD if self.form == "post" else self.attention_norm(x_BLD))
            y_BLD, cache = self.attention(inner_BLD, positions_BL, segments_BL, local, cache, bias_HW)
            x_BLD = self._added(x_BLD, y_BLD, key, self.attention_norm, self.attention_output_norm)
        return x_BLD, cache

    def feed(
        self,
        x_BLD: jax.Array,
        mlp_input_BLD: jax.Array,
        key: jax.Array | None,
        segments_BL: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing | None]:
        """Add the output of the MLP (or experts) to the residual stream; its input is another one beside attention."""
        with jax.named_scope("mlp"):
            inner_BLD = self.inner(mlp_input_BLD if self.form == "post" else self.mlp_norm(mlp_input_BLD))
            routing: Routing | None = None
            if isinstance(self.mlp, MoE):
                real_BL = None if segments_BL is None else segments_BL != 0
                y_BLD, loss_BL, load_E = self.mlp(inner_BLD, real_BL)
                routing = Routing.of(loss_BL, load_E)
            else:
                y_BLD = self.mlp(inner_BLD)
            x_BLD = self._added(x_BLD, y_BLD, key, self.mlp_norm, self.mlp_output_norm)
        return x_BLD, routing

    def _added(
        self, x_BLD: jax.Array, y_BLD: jax.Array, key: jax.Array | None, norm: Norm, output_norm: Norm | None
    ) -> jax.Array:
        """The residual stream with an output of attention or MLP, after the norms that stand behind it."""
        if output_norm is not None:
            y_BLD = output_norm(y_BLD)
        x_BLD = constrain(x_BLD + dropout(y_BLD, self.dropout, key), *RESIDUAL)
        return constrain(norm(x_BLD), *RESIDUAL) if self.form == "post" else x_BLD
